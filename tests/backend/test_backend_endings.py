"""A rank that is killed: every other one raises in time and names it, and nothing is left."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from backend_job import Job, free_ports

SCENARIOS = ["all_reduce", "between", "barrier", "ring", "backward"]
# As many as one likes: STORM_KILLS=50 pytest tests/backend/test_backend_endings.py -s
TRIALS = max(int(os.environ.get("STORM_KILLS", "0")) // len(SCENARIOS), 1)
SILENCE_S = 2.0
# On top of the silence: for the way from rank to rank, and for a machine that is busy.
MARGIN_S = 1.5


@pytest.mark.timeout(60 + 60 * TRIALS)
@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_rank_is_named_by_all_others_and_nothing_is_left(scenario: str, world: int, tmp_path: Path) -> None:
    # The same ports again and again: each job shows that the one before has left them.
    ports = free_ports(1 + world)
    events = random.Random(world)
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        settings = {
            "STORM_FLIGHT_DIR": str(folder),
            "KILL_AFTER_S": str(events.uniform(0.0, 0.05)),
            "SILENCE_S": str(SILENCE_S),
        }
        with Job("backend_victim.py", scenario, world, ports, **settings) as job:
            said = job.end()
            job.check_nothing_is_left()
        assert said[1]["exit"] == -signal.SIGKILL, said
        for rank in [rank for rank in range(world) if rank != 1]:
            met = said[rank]
            assert met["exit"] == 0, (met["stderr"], met)
            took = met["raised"] - said[1]["killed"]
            print(f"{scenario} {world} ranks, trial {trial}, rank {rank}: {took:.2f} s, {met['kind']} {met['text']}")
            assert took < SILENCE_S + MARGIN_S, met
            assert met["destroyed"] - met["raised"] < MARGIN_S, met
            # Either the first rank to notice, or one that received its report: both name the dead rank.
            assert "nothing was received from rank 1" in met["text"], met
            assert f"rank {rank}: " in met["text"], met
            if scenario != "backward":
                assert met["culprit"] == 1
                assert met["kind"] in ("PeerSilent", "PeerFailed", "PeerLeft"), met
            records = list(folder.glob(f"storm-flight-*-rank{rank}-*.json"))
            assert len(records) == 1, (records, met)
            record = json.loads(records[0].read_text())
            assert "nothing was received from rank 1" in record["error"], record
            assert "nothing was received from rank 1" in record["operations"][-1].get("error", record["error"]), record
