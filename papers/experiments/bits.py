"""Do two machines compute the same bits? Small trainings whose losses, digit by digit, are condensed to a digest.

Computes them on this machine's CPU and, if it has one, on its GPU, and adds a line with its name and versions to
results/bits.json. Whoever runs it elsewhere and finds the same digests has the same bits. A minute on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from grid import GPU, RESULTS

from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.simulation.checkpoints import replacing
from stormtorch_lab.studies.on_workers import simulate_one, task_of
from stormtorch_lab.studies.settings import SimSettings

CASES: dict[str, dict[str, Any]] = {
    "lead": {"policies": ("lead",), "steps": 40},
    "int8, parity": {"policies": ("lead",), "steps": 20, "loss": 0.4, "wire": "int8", "redundancy": "auto"},
    "models averaged": {"policies": ("model-averaging",), "steps": 20},
}
ON_GPU: dict[str, dict[str, Any]] = {
    "": GPU,
    ", fused": GPU | {"fuse": True},
}


def digest(data: Path, device: str, **options: Any) -> str:
    """Digest of every loss of a small training, with all of its digits."""
    common: dict[str, Any] = {"workers": 16, "batch": 4, "held_out": 128, "loss": 0.1, "data": data / "wikitext-2"}
    settings = SimSettings(**(common | {"device": device} | options))
    found = simulate_one(settings, task_of(settings), settings.policies[0], 0)
    return hashlib.sha256(repr((found.curve, found.val_loss)).encode()).hexdigest()[:12]


def computed(data: Path) -> dict[str, str]:
    """All digests that this machine can compute, by name."""
    found = {}
    for name, options in CASES.items():
        found[f"CPU, {name}"] = digest(data, "cpu", **options)
        if torch.cuda.is_available():
            for kind, more in ON_GPU.items():
                found[f"GPU{kind}, {name}"] = digest(data, "cuda", **options, **more)
    return found


def table(kept: dict[str, Any]) -> list[str]:
    """Rows of the page's table: a training, its digests, and how many machines computed each."""
    rows = []
    names = sorted({name for each in kept["machines"] for name in each["digests"]})
    for name in names:
        seen = [each["digests"][name] for each in kept["machines"] if name in each["digests"]]
        digests = ", ".join(f"`{one}` ({seen.count(one)})" for one in sorted(set(seen)))
        rows.append(f"| {name} | {digests} |")
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with wikitext-2 (see README.md)")
    parser.add_argument("--draw", action="store_true", help="compute nothing, print what is there")
    chosen = parser.parse_args()
    path = RESULTS / "bits.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machines": []}
    if not chosen.draw:
        if chosen.data is None or not chosen.data.is_dir():
            parser.error("--data must name the folder of the data: README.md tells what is in it")
        torch.set_num_threads(1)
        digests = computed(chosen.data)  # before the surroundings, which tell of a GPU that is in use
        kept["machines"].append({"digests": digests, **surroundings()})
        with replacing(path) as beside:
            beside.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(table(kept)))


if __name__ == "__main__":
    main()
