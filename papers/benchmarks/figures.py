"""Writes the tables of figures in README.md from the files beside it: `python papers/benchmarks/figures.py`."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
MARKS = ("figures", "ugly paths")
# Files of exchanges and steps on one machine or by cable, in the order of the table.
FILES = (
    "allreduce-2-hosts",
    "allreduce-4-hosts",
    "mpi-2-hosts",
    "mpi-4-hosts",
    "cable-1500",
    "cable-9000",
    "ddp-2-hosts",
    "ddp-4-hosts",
    "allreduce-16-cores-2",
    "allreduce-16-cores-4",
    "allreduce-16-cores-8",
    "allreduce-16-cores-16",
    "lanes-1472-16-cores",
    "lanes-8972-16-cores",
    "ddp-cuda-4-ranks",
)
# Labs with bursts of losses, and with long paths.
BURSTS = ("lab-bursts-4-100mbit", "lab-bursts-4-400mbit", "lab-bursts-6-100mbit", "lab-bursts-6-400mbit")
LONG = ("lab-long-100mbit-40ms-loss10", "lab-long-50mbit-80ms-loss23", "lab-long-20mbit-150ms-loss3")


def table() -> str:
    """One row per file, size and backend: its time and processor time, beside those of the first gloo."""
    rows = ["| file | size | backend | median, ms | x gloo | x ideal | Gbit/s | CPU s/GB | x gloo |"]
    rows.append("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for name in FILES:
        path = FOLDER / f"{name}.json"
        if not path.exists():
            continue
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        for result in results:
            gloo = next(
                each for each in results if each["backend"].startswith("gloo") and each.get("mb") == result.get("mb")
            )
            size = f"{result['mb']:g} MB" if "mb" in result else "a step"
            cells = [name, size, result["backend"], f"{1e3 * result['median_s']:.1f}"]
            cells.append(_ratio(result["median_s"], gloo["median_s"]))
            cells.append(_ratio(result["median_s"], result.get("ideal_s")))
            cells.append(f"{result['gbit_per_s']:.1f}" if "gbit_per_s" in result else "")
            cpu_s, gloo_cpu_s = result.get("cpu_s_per_gb"), gloo.get("cpu_s_per_gb")
            cells += ["" if cpu_s is None else f"{cpu_s:.2f}", _ratio(cpu_s, gloo_cpu_s)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value is not None and base else ""


def ugly_paths() -> str:
    """One row per network: lossy and exact all-reduce over the ideal, their worst rounds, and what disturbed them."""
    rows = ["| file | lost | in bursts of | lossy | worst | exact | worst | processors withheld |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in (*BURSTS, *LONG):
        path = FOLDER / f"{name}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        for point in data.get("points", [data["conditions"] | {"results": data.get("results")}]):
            loss = point["requested"]["loss"]
            lost, burst = (loss["p"], f"{loss['burst']:g}") if isinstance(loss, dict) else (loss, "")
            results = {each["backend"]: each for each in point["results"]}
            cells = [name, f"{100 * lost:g} %", burst]
            for each in (results["storm-lossy"], results["storm"]):
                cells += [_ratio(each["median_s"], each["ideal_s"]), _ratio(each["worst_s"], each["ideal_s"])]
            cells.append(f"{100 * point['processors_withheld']:.1f} %")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def rarely() -> str:
    """Rows of docs/applications.md: who trained how fast over a thin, long path, and when it came to the loss."""
    labels = {
        "storm-drift": "`BoundedDrift`",
        "diloco": "`DiLoCo`, every 30",
        "streaming-diloco": "`StreamingDiLoCo`, every 30",
        "sparse-diloco": "`SparseDiLoCo`, every 30",
        "gloo-bbr": "DDP on gloo, TCP-BBR",
        "gloo-cubic": "DDP on gloo, TCP-CUBIC",
    }
    data = json.loads((FOLDER / "lab-rarely-20mbit-100ms-loss5.json").read_text(encoding="utf-8"))
    rows = []
    for result in data["results"]:
        step_s, reached_s = result["step_s"], result["reached_s"]
        step = f"{step_s:.1f} s" if step_s > 1.0 else f"{1e3 * step_s:.0f} ms"
        cells = [labels[result["backend"]], f"{result['steps'][-1]}", step]
        cells += ["-" if reached_s is None else f"{reached_s:.0f} s", f"{result['losses'][-1]:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def renewed(text: str) -> str:
    """The README with the tables as the files have them now."""
    for mark, content in zip(MARKS, (table(), ugly_paths()), strict=True):
        begin, end = f"<!-- {mark}: python papers/benchmarks/figures.py -->\n", f"<!-- end of {mark} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"README.md has no place for {mark}")
        text = f"{before}{begin}{content}{end}{after}"
    return text


if __name__ == "__main__":
    readme = FOLDER / "README.md"
    readme.write_text(renewed(readme.read_text(encoding="utf-8")), encoding="utf-8")
