"""A rank that is killed: every other one raises in time and says whose fault it was, and nothing is left."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

VICTIM = str(Path(__file__).with_name("backend_victim.py"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_killed_rank_is_named_by_all_others_and_nothing_is_left(tmp_path: Path) -> None:
    # As many as one likes: STORM_KILLS=50 pytest tests/test_backend_endings.py
    for _ in range(int(os.environ.get("STORM_KILLS", "2"))):
        world = 3
        port = str(free_port())
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
        common["STORM_FLIGHT_DIR"] = str(tmp_path)
        ranks = [
            subprocess.Popen(
                [sys.executable, VICTIM],
                env=os.environ | common | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        said = [each.communicate(timeout=60) for each in ranks]
        assert [each.returncode for each in ranks] == [0, -signal.SIGKILL, 0], said
        for rank in (0, 2):
            seconds, kind, text = said[rank][0].strip().split(" ", 2)
            assert float(seconds) < 6.0, said[rank]
            assert text.startswith(f"rank {rank}: all_reduce (channel "), said[rank]
            # The first to notice names the dead; the other may hear from that one first.
            assert (kind == "PeerSilent" and "rank 1" in text) or kind in ("PeerFailed", "PeerLeft"), said[rank]
        assert any("nothing was heard of rank 1 for 2 s" in said[rank][0] for rank in (0, 2)), said
