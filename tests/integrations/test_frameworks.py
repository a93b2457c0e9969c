"""prepare() inside Lightning, Accelerate and the Trainer of transformers: two workers train, save and resume."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.pure, pytest.mark.slow]

HELPERS = Path(__file__).parents[1] / "helpers"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def told_by(package: str, launcher: tuple[str, ...], script: str, folder: Path) -> list[dict[str, Any]]:
    """Runs a script on two workers, and returns what each of them prints."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[frameworks]'")
    environment = os.environ | {"HOME": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*launcher, str(HELPERS / script), str(folder / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    # Two processes write to one pipe: their lines may interleave.
    told = [json.loads(found) for found in re.findall(r'\{"rank"[^}]*\}', done.stdout)]
    return sorted(told, key=lambda each: int(each["rank"]))


def test_lightning_clips_accumulates_evaluates_saves_and_resumes_by_prepare(tmp_path: Path) -> None:
    ranks = told_by("lightning", (sys.executable,), "lightning_training.py", tmp_path)
    assert [each["rank"] for each in ranks] == [0, 1]
    for each in ranks:
        assert each["wrapped"] == "Classifier"
        # Clipped by pieces, an update would be longer by the square root of two.
        assert each["clipped"] < 1e-5
        assert each["held"] == 0.0
        assert len(each["same"]) == 12 and all(each["same"])
        assert each["saved"]
        assert each["steps"] == 8  # of the second training: 2 of 4 epochs, 4 steps each
        assert each["rate"] == 0.0625  # the schedule went on from the checkpoint
        assert 0.5 < each["arrived"] < 0.95


def test_accelerate_saves_and_loads_all_that_is_prepared(tmp_path: Path) -> None:
    for each in told_by("accelerate", TORCHRUN, "accelerate_training.py", tmp_path):
        assert each["wrapped"] == "Sequential"
        # Parameters share the memory of a bucket. Accelerate would save only the first of them.
        assert each["in_file"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert each["loaded"] and each["same"]
        assert each["steps"] == 28
        assert each["losses"][1] < 0.7 * each["losses"][0]
        assert 0.6 < each["arrived"] < 0.95


def test_the_trainer_of_transformers_trains_evaluates_saves_and_resumes_by_prepare(tmp_path: Path) -> None:
    ranks = told_by("transformers", TORCHRUN, "trainer_training.py", tmp_path)
    for each in ranks:
        assert each["wrapped"] == "GPT2LMHeadModel"
        assert each["saved"]
        assert each["state"] == each["parameters"] == 28
        assert each["steps"] == [8, 8, 16]
        assert each["losses"] == sorted(each["losses"], reverse=True)
        assert 0.8 < each["arrived"] < 0.97
    assert ranks[0]["evaluated"] == ranks[1]["evaluated"]
