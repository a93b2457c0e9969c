"""Runs all applications at several loss rates, keeps what they measure, and writes the tables of README.md.

Each runs on four virtual hosts of the network lab, whose network really loses packets. That needs root, or user
namespaces; where a lab cannot be made, ranks run on this machine, stormtorch's own datagrams are dropped on purpose,
and results say so.

    python examples/applications/run.py                       # everything that is not in the file of results yet
    python examples/applications/run.py --only quantiles --losses 0.1
    python examples/applications/run.py --renew               # only the tables, from the results that are there

Every run is kept as soon as it is done. Take its line out of the file to measure it again.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "papers" / "experiments" / "results" / "applications.json"
PAGE = FOLDER / "README.md"
APPLICATIONS = ("diffusion", "anomalies", "quantiles", "uncertainty")
LOSSES = (0.0, 0.1, 0.4)
RANKS, RATE = 4, "100mbit"
# Rows of the table of each application: what an application calls a number, what the page calls it, and its decimals.
ROWS: dict[str, list[tuple[str, str, int]]] = {
    "diffusion": [
        ("with embeddings", "held-out denoising loss, with embeddings", 4),
        ("without embeddings", "held-out denoising loss, without", 4),
        ("with embeddings, new client", "the same of a new client, before it has learned its embedding", 4),
        ("new client with its embedding", "the same of a new client, with its own embedding", 4),
        ("without embeddings, new client", "the same of a new client, of the model without embeddings", 4),
        ("embeddings differ", "ranks whose embeddings differ", 0),
        ("with arrived", "chunks that arrived, %", 1),
    ],
    "anomalies": [
        ("frozen AUROC", "AUROC, frozen model", 3),
        ("adapters AUROC", "AUROC, adapters", 3),
        ("full AUROC", "AUROC, everything tuned", 3),
        ("frozen F1", "F1, frozen model", 3),
        ("adapters F1", "F1, adapters", 3),
        ("full F1", "F1, everything tuned", 3),
        ("adapters kilobytes", "kB sent by a rank in a step, adapters", 0),
        ("full kilobytes", "kB sent by a rank in a step, everything tuned", 0),
        ("adapters arrived", "chunks that arrived, adapters, %", 1),
    ],
    "quantiles": [
        ("L1 found", "variables found, of 8: L1", 1),
        ("SCAD found", "variables found: SCAD", 1),
        ("MCP found", "variables found: MCP", 1),
        ("L1 wrong", "variables without effect that were kept, of 192: L1", 1),
        ("SCAD wrong", "variables without effect: SCAD", 1),
        ("MCP wrong", "variables without effect: MCP", 1),
        ("L1 error", "distance to the true coefficients: L1", 3),
        ("SCAD error", "distance: SCAD", 3),
        ("MCP error", "distance: MCP", 3),
        ("L1 excess", "held-out quantile loss above that of the true coefficients: L1, %", 2),
        ("SCAD excess", "the same: SCAD, %", 2),
        ("MCP excess", "the same: MCP, %", 2),
        ("arrived", "chunks that arrived, %", 1),
    ],
    "uncertainty": [
        ("kernel AUROC", "AUROC of known against unknown digits, kernels", 4),
        ("softmax AUROC", "AUROC, softmax", 4),
        ("kernel accuracy", "accuracy on known digits, kernels, %", 1),
        ("softmax accuracy", "accuracy, softmax, %", 1),
        ("kernel arrived", "chunks that arrived, kernels, %", 1),
    ],
}
_PERCENT = ", %"
# Numbers that tell of the network, or count something: loss is not to be read as what changed them.
_PLAIN = ("arrived", "kilobytes", "embeddings differ")


# --- running ----------------------------------------------------------------------------------------------------------


def measure(name: str, loss: float, chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs one application at one loss rate, in the lab or else on this machine; returns it with its conditions."""
    from stormtorch_lab.jobs.surroundings import StealTime, surroundings
    from stormtorch_lab.netns import Lab, LabUnavailable

    around, withheld = surroundings(), StealTime()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [sys.executable, str(FOLDER / f"{name}.py"), "--seeds", str(chosen.seeds), "--policy", chosen.policy]
        words += ["--json", str(file), *(["--steps", str(chosen.steps)] if chosen.steps else [])]
        try:
            with Lab(RANKS, rate=RATE, loss=loss, management=True) as lab:
                lines: list[str] = []
                statuses = lab.run(words, timeout_s=chosen.timeout_s, write=lambda line: lines.append(line.text))
                counted = lab.measured()
                network = {
                    "network": f"lab: {lab.kind}",
                    "requested": lab.conditions.to_json(),
                    "loss_measured": counted.loss,
                    "overflow_measured": counted.overflow,
                }
            said = "\n".join(lines)
        except LabUnavailable as reason:
            print(f"no lab: {reason}\nranks run on this machine, and drop datagrams on purpose", flush=True)
            words += ["--loss", str(loss), "--ranks", str(RANKS)]
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=chosen.timeout_s)
            statuses, said = [done.returncode], done.stdout + done.stderr
            network = {"network": "loopback, loss injected", "requested": {"loss": loss}}
        if any(statuses) or not file.exists():
            raise SystemExit(f"{name} at {loss:.0%} loss ended with {statuses}:\n{said}")
        found = json.loads(file.read_text(encoding="utf-8"))
    return found | network | {"processors_withheld": withheld.share()} | around


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the runs that are there, by application and loss rate."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
    return found


def check(key: str, runs: dict[str, dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Ends the program if a run that is there was made with other settings than those that are asked for."""
    for name, had in runs.get(key, {}).get("settings", {}).items():
        asked = getattr(chosen, name, None) if name in ("seeds", "steps", "policy") else None
        if asked is not None and asked != had:
            raise SystemExit(f"{key} was run with --{name} {had}, not {asked}: take its line out of {chosen.json}")


def keep(path: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Writes all runs, a line for each; if this is interrupted, the earlier file stays."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(run)}" for key, run in sorted(runs.items()))
    beside = path.with_name(path.name + ".new")
    beside.write_text(f'{{"runs": {{\n{lines}\n}}}}\n', encoding="utf-8")
    os.replace(beside, path)


# --- tables -----------------------------------------------------------------------------------------------------------


def table(name: str, runs: dict[str, dict[str, Any]]) -> str:
    """Returns the table of an application: means over seeds at each loss rate, and what loss changed, seed by seed."""
    losses = [loss for loss in LOSSES if f"{name}/{loss:g}" in runs]
    rows = [f"| | {' | '.join(f'{100 * loss:g} % loss' for loss in losses)} |", "|---" + "|---:" * len(losses) + "|"]
    for key, words, decimals in ROWS[name]:
        scale = 100 if words.endswith(_PERCENT) else 1
        found = [[scale * run[key] for run in runs[f"{name}/{loss:g}"]["runs"]] for loss in losses]
        cells = [with_error(found[0], decimals)]
        for values in found[1:]:
            cells.append(f"{statistics.mean(values):.{decimals}f}")
            if losses[0] == 0 and not key.endswith(_PLAIN):
                changes = [now - before for now, before in zip(values, found[0], strict=True)]
                cells[-1] += f" ({with_error(changes, decimals, sign='+')})"
        rows.append(f"| {words} | {' | '.join(cells)} |")
    counted = [runs[f"{name}/{loss:g}"].get("loss_measured") for loss in losses]
    if None not in counted:
        rows.append(f"| packets that the lab lost, % | {' | '.join(f'{100 * each:.1f}' for each in counted)} |")
    return "\n".join(rows) + "\n"


def with_error(values: list[float], decimals: int, sign: str = "") -> str:
    """Returns the mean of several seeds and its standard error, unless that is too small to be seen."""
    mean = f"{round(statistics.mean(values), decimals) + 0.0:{sign}.{decimals}f}"  # + 0.0: no "-0.00"
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean if float(f"{error:.{decimals}f}") == 0 else f"{mean} ± {error:.{decimals}f}"


def renewed(text: str, runs: dict[str, dict[str, Any]]) -> str:
    """Returns the page with its tables as the results have them now."""
    for name in APPLICATIONS:
        begin, end = f"<!-- {name}: python examples/applications/run.py --renew -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE.name} has no place for the table of {name}")
        text = f"{before}{begin}{table(name, runs)}{end}{after}"
    return text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(APPLICATIONS), help="applications, separated by commas (all)")
    parser.add_argument("--losses", default="0,0.1,0.4", help="loss rates, separated by commas (0,0.1,0.4)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each (3)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each training (each application's own)")
    parser.add_argument("--policy", default="lead", help="policy by name, or a class in a file (lead)")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="seconds that one run may take (1200)")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"file of results ({RESULTS.name})")
    parser.add_argument("--renew", action="store_true", help="run nothing; write the tables into README.md")
    chosen = parser.parse_args()
    runs = load(chosen.json)
    if chosen.renew:
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
        return
    names = chosen.only.split(",")
    unknown = sorted(set(names) - set(APPLICATIONS))
    if unknown:
        parser.error(f"--only must name some of {', '.join(APPLICATIONS)}, got {', '.join(unknown)}")
    for loss in map(float, chosen.losses.split(",")):
        for name in names:
            key = f"{name}/{loss:g}"
            check(key, runs, chosen)
            if key not in runs:
                print(f"{name} at {loss:.0%} loss", flush=True)
                runs[key] = measure(name, loss, chosen)
                keep(chosen.json, runs)
    for name in names:
        print(f"\n{name}\n{table(name, runs)}")


if __name__ == "__main__":
    main()
