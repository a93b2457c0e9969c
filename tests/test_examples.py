"""The examples, as a reader would run them: each is a program of its own that ends with a line about how it went."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from example_runs import EXAMPLES, verdict

pytestmark = pytest.mark.pure

PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


# Frameworks mostly start: several processes import torch and them. On two cores that others kept busy, Lightning spent
# 55 of 61 s on that, and Ray 72 of 115 s. The limit is there for what hangs.
_FRAMEWORK_S = 300.0


def run(launcher: tuple[str, ...], script: str, home: Path, *arguments: str, within_s: float = 110.0) -> str:
    # A home of its own: Ray and Lightning write there. And nobody is to be told that they were used.
    environment = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [*launcher, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=within_s,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    ranks, accuracy, replicas = verdict(done.stdout)
    assert (ranks, replicas) == (2, "identical")
    assert accuracy > 80
    return done.stdout


@pytest.mark.thorough
def test_plain_ddp_runs_on_storm(tmp_path: Path) -> None:
    run(TORCHRUN, "ddp.py", tmp_path)


@pytest.mark.slow
def test_a_prepared_model_trains_under_loss_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    checkpoint, ledger = tmp_path / "checkpoint.pt", tmp_path / "ledger.jsonl"
    for run_before in range(2):
        assert checkpoint.exists() == bool(run_before)
        files = ("--checkpoint", str(checkpoint), "--ledger", str(ledger))
        output = run(TORCHRUN, "prepare.py", tmp_path, "--loss", "0.1", *files)
        steps, arrived = re.findall(r"(\d+) steps, ([0-9.]+)% of the chunks arrived", output)[0]
        assert 85 < float(arrived) < 95
        assert len(ledger.read_text().splitlines()) == (run_before + 1) * int(steps)
    assert checkpoint.exists()


@pytest.mark.thorough
def test_an_elastic_loop_uses_every_sample_once(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(EXAMPLES / "elastic_data.py"), "--epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+) steps, 3 epochs, accuracy ([0-9.]+)%", done.stdout)
    assert [steps for steps, _ in found] == ["72", "72"]  # of 1500 samples, 64 in each
    assert all(float(accuracy) > 60 for _, accuracy in found)


@pytest.mark.slow
def test_storm_replicates_across_hosts_what_another_backend_shards_inside(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN[:-1], "4", str(EXAMPLES / "hsdp_replicate.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("replicate by storm") == 4
    (accuracy,) = re.findall(r"4 ranks: loss [0-9.]+, accuracy ([0-9.]+)%, replicas identical", done.stdout)
    assert float(accuracy) > 80


@pytest.mark.slow
def test_any_model_is_simulated(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*PYTHON, str(EXAMPLES / "simulate.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(.+): loss ([0-9.]+), accuracy ([0-9.]+)%, replicas differ by (\S+)", done.stdout)
    assert [name for name, *_ in found] == ["lossless", "without a lead", "with the lead"]
    losses = [float(loss) for _, loss, _, _ in found]
    assert all(float(accuracy) > 80 for _, _, accuracy, _ in found)
    assert abs(losses[2] / losses[0] - 1) < 0.1
    assert [float(apart) > 0 for *_, apart in found] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "launcher", "script"),
    [
        ("lightning", PYTHON, "lightning_ddp.py"),
        ("accelerate", TORCHRUN, "accelerate_ddp.py"),
        ("ray", PYTHON, "ray_train.py"),
        ("lightning", PYTHON, "lightning_prepare.py"),
        ("accelerate", TORCHRUN, "accelerate_prepare.py"),
        ("transformers", TORCHRUN, "trainer_prepare.py"),
        ("ray", PYTHON, "ray_prepare.py"),
    ],
)
@pytest.mark.timeout(_FRAMEWORK_S + 30.0)
def test_framework_runs_on_storm(package: str, launcher: tuple[str, ...], script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[frameworks]'")
    run(launcher, script, tmp_path, within_s=_FRAMEWORK_S)
