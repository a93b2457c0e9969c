"""Exchanges over recorded links, beside gloo and QUIC: `python papers/benchmarks/traces.py LINKS.jsonl --json FILE`.

LINKS.jsonl has a recorded link per line, whose `bits` say of each packet whether it was lost (1); `loss` is their
mean. Of the links that lose 0.5 to 30 %, some are picked by even ranks of their loss. Two hosts of a lab replay each
of them in both directions, and all-reduce a tensor: storm, lossy storm, gloo over TCP with BBR and with CUBIC. QUIC
is ngtcp2's file transfer (Debian's ngtcp2-client and ngtcp2-server), if it is installed: each host fetches a file
from the other, so that the same bytes travel each way. It is timed from the start of the client, so one handshake is
within; and it need not wait for the first half of the bytes before it sends the second. Needs what the lab needs.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from stormtorch.network.units import parse_rate
from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
from stormtorch_lab.bench.results import ideal_s
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.netns import Conditions, Lab, read_per_link

BACKENDS = ("gloo-cubic", "gloo-bbr", "storm", "storm-lossy")
LEAST_LOSS, MOST_LOSS = 0.005, 0.3
PORT = 4433


def picked(path: Path, count: int) -> list[tuple[int, float]]:
    """Lines of the links to replay, with their loss, from the least to the most."""
    losses = [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]
    usable = sorted((loss, line) for line, loss in enumerate(losses) if LEAST_LOSS <= loss <= MOST_LOSS)
    if not usable:
        raise SystemExit(f"{path} has no link that loses {LEAST_LOSS:.1%} to {MOST_LOSS:.0%}")
    middles = [int((index + 0.5) * len(usable) / count) for index in range(count)]
    return [(usable[middle][1], usable[middle][0]) for middle in middles]


def conditions_of(path: Path, line: int, options: argparse.Namespace, folder: Path) -> Conditions:
    """Both directions between two hosts lose what the link on that line lost, over and over."""
    trace = {"file": str(path.resolve()), "line": line}
    links = folder / "links.json"
    links.write_text(json.dumps({"links": [{"from": "*", "to": "*", "trace": trace}]}), encoding="utf-8")
    return read_per_link(links, Conditions(rate=options.rate, delay=options.delay, seed=options.seed), 2)


def quic_times(network: Conditions, control: str, size_bytes: int, options: argparse.Namespace) -> list[float]:
    """Seconds until both hosts have fetched a file from each other, for each round; 0 rounds if one gave up."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as name, Lab(2, network, probe=False) as lab:
        folder = Path(name)
        key, certificate, site = folder / "key.pem", folder / "certificate.pem", folder / "site"
        request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        request += ["-subj", "/CN=lab", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(request, check=True, capture_output=True)
        site.mkdir()
        (site / "file").write_bytes(bytes(size_bytes))
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        serve = [
            "gtlsserver",
            "--quiet",
            f"--cc={control}",
            "-d",
            str(site),
            "*",
            str(PORT),
            str(key),
            str(certificate),
        ]
        servers = [lab.start(host, serve, **quiet) for host in (0, 1)]
        try:
            time.sleep(0.5)
            for _ in range(options.iters):
                begin = time.monotonic()
                clients = []
                for host in (0, 1):
                    into, peer = folder / f"from-{1 - host}", lab.address(1 - host)
                    shutil.rmtree(into, ignore_errors=True)
                    into.mkdir()
                    fetch = ["gtlsclient", "--quiet", "--exit-on-all-streams-close", f"--cc={control}"]
                    fetch += [f"--download={into}", peer, str(PORT), f"https://{peer}/file"]
                    clients.append((lab.start(host, fetch, **quiet), into / "file"))
                for client, _ in clients:
                    client.wait(timeout=max(begin + options.patience_s - time.monotonic(), 0.01))
                times.append(time.monotonic() - begin)
                if any(not file.is_file() or file.stat().st_size != size_bytes for _, file in clients):
                    times.pop()
                    break
        except subprocess.TimeoutExpired:
            times.append(options.patience_s)
        finally:
            for server in servers:
                server.kill()
                server.wait()
    return times


def measure(path: Path, line: int, loss: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of every backend on one recorded link."""
    size_bytes = int(options.mb * 1e6)
    ideal = ideal_s(2, size_bytes, parse_rate(options.rate))
    rows: list[dict[str, Any]] = []

    def add(backend: str, times: list[float], **more: Any) -> None:
        middle = statistics.median(times) if times else None
        rows.append(
            {
                "line": line,
                "loss_of_trace": loss,
                "backend": backend,
                "median_s": middle,
                "worst_s": max(times, default=None),
                "over_ideal": middle / ideal if middle else None,
                "times_s": times,
                **more,
            }
        )
        print(f"line {line}, {loss:5.1%}  {backend:12} {f'{middle / ideal:6.2f} x ideal' if middle else 'failed'}")

    with tempfile.TemporaryDirectory() as name:
        network = conditions_of(path, line, options, Path(name))
        settings = AllReduceSettings(
            ranks=2,
            mb=(options.mb,),
            iters=options.iters,
            warmup=1,
            backends=BACKENDS,
            network=network,
            seed=options.seed,
            patience_s=options.patience_s,
        )
        report = run_allreduce(settings)
        for result in report.results:
            more = {"arrived": result.arrived, "gave_up": result.gave_up, "cpu_s_per_gb": result.cpu_s_per_gb}
            add(result.backend, result.times_s, **more)
        if shutil.which("gtlsclient") and shutil.which("gtlsserver"):
            for control in ("cubic", "bbr"):
                add(f"quic-{control}", quic_times(network, control, size_bytes, options))
    return rows


def main() -> None:
    """Measures, and writes all times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", type=Path, help="JSON lines of recorded links")
    parser.add_argument("--picks", type=int, default=6, help="links to replay (6)")
    parser.add_argument("--rate", default="50mbit", help="rate of each host's line (50mbit)")
    parser.add_argument("--delay", default="5ms", help="delay one way (5ms)")
    parser.add_argument("--mb", type=float, default=2.5, help="size of the tensor and of QUIC's file in MB (2.5)")
    parser.add_argument("--iters", type=int, default=9, help="timed rounds of each (9)")
    parser.add_argument("--patience-s", type=float, default=30.0, help="seconds until a transfer is given up (30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lab (0)")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    rows = [
        row
        for line, loss in picked(options.links, options.picks)
        for row in measure(options.links, line, loss, options)
    ]
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "links")}
    told = {"settings": settings, "trace": options.links.name, "surroundings": surroundings(), "results": rows}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
