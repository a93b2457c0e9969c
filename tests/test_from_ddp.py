"""Pairs of scripts, for DDP and for prepare(): few lines differ, both run on two ranks, and both learn the same."""

import difflib
import os
import re
from pathlib import Path
from typing import Any

import pytest

import warm_scripts
from backend_job import Job, free_ports
from example_runs import EXAMPLES

pytestmark = pytest.mark.pure

FOLDER = EXAMPLES / "from_ddp"
# Lines of the script for prepare() that the one for DDP does not have, its own name in the first lines included.
NEW_LINES = {"gpt": 6, "image": 9, "llama": 6}


def new_lines(name: str) -> list[str]:
    ddp, storm = ((FOLDER / f"{name}_{kind}.py").read_text().splitlines() for kind in ("ddp", "storm"))
    return [line for line in difflib.ndiff(ddp, storm) if line.startswith("+ ") and line[2:].strip()]


def run(script: str, folder: Path, *arguments: str) -> str:
    """Runs a script on two ranks, and returns what rank 0 prints."""
    (port,) = free_ports(1)
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [str(Path(__file__).parent / "helpers" / "one_thread.py"), str(FOLDER / script), *arguments]
    ranks, logs = [], [folder / f"{script}-{rank}.log" for rank in range(2)]
    for number, log in enumerate(logs):
        with log.open("wb") as file:
            own = environment | {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"}
            ranks.append(warm_scripts.start(command, env=own, stdout=file, stderr=file))
    try:
        codes = [rank.wait(100.0) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], [log.read_text() for log in logs]
    return logs[0].read_text()


def losses(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"loss ([0-9.]+)", output)]


@pytest.mark.parametrize("name", NEW_LINES)
def test_few_lines_of_a_script_for_ddp_change(name: str) -> None:
    assert len(new_lines(name)) == NEW_LINES[name]


@pytest.mark.thorough
def test_a_gpt_learns_the_same_by_prepare(tmp_path: Path) -> None:
    options = ("--iterations", "20", "--evaluate-every", "10", "--accumulate", "2")
    by_ddp, by_storm = (losses(run(f"gpt_{kind}.py", tmp_path, *options)) for kind in ("ddp", "storm"))
    assert len(by_ddp) == len(by_storm) == 3
    assert by_ddp[-1] < 0.8 * by_ddp[0]
    assert by_storm == pytest.approx(by_ddp, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ddp", "storm"])
def test_a_gpt_goes_on_from_the_checkpoint_of_either(first: str, tmp_path: Path) -> None:
    second = {"ddp": "storm", "storm": "ddp"}[first]
    saved = ("--checkpoint", str(tmp_path / "gpt.pt"))
    before = losses(run(f"gpt_{first}.py", tmp_path, "--iterations", "10", *saved))
    after = losses(run(f"gpt_{second}.py", tmp_path, "--iterations", "20", "--evaluate-every", "10", *saved))
    assert after[0] == pytest.approx(before[-1], rel=1e-3)  # evaluated before it goes on
    assert after[-1] < 0.9 * after[0]


@pytest.mark.slow
def test_an_image_classifier_learns_the_same_by_prepare(tmp_path: Path) -> None:
    by_ddp, by_storm = (run(f"image_{kind}.py", tmp_path) for kind in ("ddp", "storm"))
    assert losses(by_storm)[-1] == pytest.approx(losses(by_ddp)[-1], rel=0.1)
    averaged = [float(re.findall(r"weights: accuracy ([0-9.]+)%", each)[0]) for each in (by_ddp, by_storm)]
    assert min(averaged) > 85


@pytest.mark.slow
def test_a_llama_is_fine_tuned_the_same_by_prepare(tmp_path: Path) -> None:
    found = []
    for kind in ("ddp", "storm"):
        output = run(f"llama_{kind}.py", tmp_path, "--save", str(tmp_path / f"{kind}.pt"))
        before, after = re.findall(r"perplexity ([0-9.]+) before, ([0-9.]+) after", output)[0]
        assert float(after) < 0.2 * float(before)
        found.append(float(after))
    assert found[1] == pytest.approx(found[0], rel=0.1)
    assert (tmp_path / "storm.pt").stat().st_size > 100_000


def told_by(scenario: str) -> list[dict[str, Any]]:
    with Job("from_ddp_entries.py", scenario, 2, free_ports(3)) as job:
        ranks = job.end(110.0)
    assert all(each["exit"] == 0 for each in ranks), [each["stderr"] for each in ranks]
    return ranks


def test_a_rank_with_fewer_batches_ends_and_the_other_goes_on() -> None:
    first, second = told_by("uneven")
    assert (first["uneven"], first["members"]) == (6, 1)
    assert second["uneven"] == 3


@pytest.mark.slow
def test_what_the_page_about_ddp_says_holds(tmp_path: Path) -> None:
    for rank in told_by(str(tmp_path)):
        right = ["rank 0's parameters", "names of the file", "goes on", "torch.distributed.checkpoint", "average moves"]
        right += ["copies", "drifts", "exact", "exact buffers", "compiled before", "compiled after", "mean loss"]
        assert {name: rank[name] for name in right} == dict.fromkeys(right, True)
        assert rank["unused"] == [True, False, True, True]
        assert rank["accumulation"] == [True, True, True]
        assert rank["scaler"] == [512.0, True, 3]  # one step of four was left out, on both ranks
        assert rank["masters"] == "torch.float32"
        assert rank["norm"] == [True, False]  # of all gradients, the same everywhere; of each by hand, this rank's own
        assert "join_hook" in rank["join"] and "'join'" in rank["model.join"]
        assert "register_comm_hook" in rank["comm hook"]
        assert "prepare() shards the optimizer itself" in rank["zero"]
        assert "SyncBatchNorm expected input tensor to be on GPU" in rank["SyncBatchNorm on a CPU"]
