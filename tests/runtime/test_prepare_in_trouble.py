"""Ranks on machines in trouble, as real processes: what cannot be had is said, and training goes on."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from full_disk import fill, may_mount, mount_small
from machine_job import Job
from machine_rank import How, Rank

mounts = pytest.mark.skipif(not may_mount(), reason="mounting a file system needs root")


# --- a full disk ------------------------------------------------------------------------------------------------------

FULL, FREE, DISK_STEPS = 8, 20, 30


def on_a_small_disk(rank: Rank) -> None:
    folder = Path(tempfile.mkdtemp())
    rank.kept.append(folder)
    mount_small(folder, 1 << 20)
    os.environ.update(STORM_RECORD=str(folder / "records"), STORM_RECORD_EVERY_S="0.05")


def follow(rank: Rank) -> None:
    rank.session.ledger.follow(rank.kept[0] / "ledger.jsonl")


def save_and_fill(rank: Rank, step: int) -> None:
    folder: Path = rank.kept[0]
    beside, checkpoint = folder / "checkpoint.new", folder / "checkpoint.pt"
    if step % 4 == 0:
        try:
            torch.save({"model": rank.model.state_dict(), "step": step}, beside)
            os.replace(beside, checkpoint)
        except (RuntimeError, OSError):
            rank.tell(unsaved=step)
            beside.unlink(missing_ok=True)
    if step == FULL:
        fill(folder)
    if step == FREE:
        (folder / "filler").unlink()
    if step == DISK_STEPS - 1:
        rank.transport.teller.end("done")  # writes what is left
        rank.tell(saved=torch.load(checkpoint)["step"])
        rank.tell(rows=[json.loads(line)["step"] for line in (folder / "ledger.jsonl").read_text().splitlines()])
        (records,) = (folder / "records").iterdir()
        rank.tell(records=[json.loads(line)["n"] for line in records.read_text().splitlines()])


@mounts
def test_a_disk_that_is_full_for_a_while_costs_rows_and_checkpoints_but_no_step(tmp_path: Path) -> None:
    how = How(steps=DISK_STEPS)
    full = How(steps=DISK_STEPS, begin=on_a_small_disk, prepared=follow, after=save_and_fill)
    with Job(tmp_path, how, {2: full}) as job:
        assert [each.end() for each in job.ranks] == [0, 0, 0]
        said = job.ranks[2]
        assert said.told("step") == list(range(1, DISK_STEPS + 1))
        assert said.told("members") == [[0, 1, 2]]
        assert set(said.told("unsaved")) >= {12, 16} and said.told("saved") == [28]
        (rows,) = said.told("rows")
        assert (
            rows[0] == 0 and rows[-1] >= DISK_STEPS - 2 and set(range(FULL + 8, FREE)).isdisjoint(rows)
        )  # a page has room for some
        # Records wait until there is room again, and none is lost.
        (records,) = said.told("records")
        assert records == list(range(len(records)))
        log = "\n".join(said.told("log"))
        for words in ("cannot write to", "it lacks", "cannot write records to", "records can be written to"):
            assert words in log
