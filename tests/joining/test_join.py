"""Late join of a running job: beyond the world, in place of a rank that died, with the store and without."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import warm_scripts

HERE = Path(__file__).parents[1] / "helpers"
KEY = "a job key of any length from sixteen bytes"
# Short, but longer than a busy machine lets a process wait for its turn.
SILENCE_S = 2.0


class Job:
    """Processes by name, and a store that may die before them. The first `started` ranks are started at once."""

    def __init__(self, started: int = 3, **how: Any) -> None:
        self.store: Any = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        self._how: dict[str, Any] = {"world": started, "port": self.store.port, "key": "", "silence_s": SILENCE_S} | how
        self._processes: dict[str, warm_scripts.Script] = {}
        self.address: dict[str, str] = {}
        self.names = [str(rank) for rank in range(started)]
        for rank in range(started):
            self.launch(str(rank), rank=rank)
        for name in self.names:
            self.up(name)
        for name in self.names:
            self.tell([name], "watch")

    def launch(self, name: str, **how: Any) -> None:
        self._processes[name] = warm_scripts.start(
            [str(HERE / "joining_rank.py"), json.dumps(self._how | how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def up(self, name: str) -> dict[str, Any]:
        """Waits until a process is in the job, and returns its rank and incarnation."""
        said: dict[str, Any] = self.hear(name)
        assert "error" not in said, said
        self.address[name] = said["address"]
        return said

    def refused(self, name: str) -> str:
        """Waits until a process is refused, and returns why."""
        return str(self.hear(name)["error"])

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def end(self, name: str, timeout_s: float) -> int:
        """Waits until a process has ended by itself; returns its exit status."""
        return self._processes.pop(name).wait(timeout_s)

    def tell(self, names: list[str], *what: Any) -> list[Any]:
        for name in names:
            self.say(name, *what)
        return [self.hear(name) for name in names]

    def say(self, name: str, *what: Any) -> None:
        pipe = self._processes[name].stdin
        assert pipe is not None
        pipe.write(json.dumps(what) + "\n")
        pipe.flush()

    def check_together(self, names: list[str], ranks: list[int]) -> int:
        """All see one view with these ranks, and add up exactly in it; returns its number."""
        seen = self.tell(names, "see", ranks)
        assert all(each == seen[0] for each in seen), seen
        number = int(seen[0]["number"])
        assert self.tell(names, "add_up", number) == [sum(rank + 1.0 for rank in ranks)] * len(names)
        return number

    def hear(self, name: str) -> Any:
        pipe = self._processes[name].stdout
        assert pipe is not None
        line = pipe.readline()
        assert line, f"{name} ended with {self._processes[name].wait(5.0)}"
        return json.loads(line)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture(params=["plain", "sealed"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(key=KEY if request.param == "sealed" else "")
    yield job
    job.close()


@pytest.fixture
def plain() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def test_a_rank_beyond_the_world_joins_by_the_address_of_any_rank(job: Job) -> None:
    job.launch("new", join=job.address["1"])
    said = job.up("new")
    assert said["rank"] >= 3
    assert said["incarnation"] >= 1
    job.check_together(["0", "1", "2", "new"], [0, 1, 2, said["rank"]])


def test_a_killed_rank_comes_in_again_without_the_store(plain: Job) -> None:
    plain.store = None  # it dies
    plain.kill("2")
    plain.tell(["0", "1"], "see", [0, 1])
    plain.launch("new", join=f"{plain.address['2']},{plain.address['0']}")
    rank = plain.up("new")["rank"]
    plain.check_together(["0", "1", "new"], [0, 1, rank])


@pytest.mark.thorough
@pytest.mark.parametrize("rejoin", [True, "auto"])
def test_a_killed_rank_is_started_again_by_the_store(rejoin: bool | str) -> None:
    job = Job(rejoin=False if rejoin is True else rejoin)
    try:
        for turn in range(2):
            job.kill("0")
            job.launch("0", rank=0, rejoin=rejoin)
            said = job.up("0")
            assert (said["rank"], said["incarnation"] > turn) == (0, True)
            job.check_together(["0", "1", "2"], [0, 1, 2])
    finally:
        job.close()


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_ranks_that_are_killed_in_the_midst_of_sealed_sums_return_over_lanes_that_lose_and_reorder() -> None:
    """Each process has its own packet numbers and keys: nothing of an earlier one counts, and no rank is locked out."""
    faults = {"loss": 0.1, "reorder": 0.3, "duplicate": 0.05, "corrupt": 0.02, "seed": 5}
    job = Job(key=KEY, rejoin="auto", lanes=3, shared_memory=False, faults=faults)
    try:
        number = job.check_together(job.names, [0, 1, 2])
        for turn, victim in enumerate(job.names):
            left = [name for name in job.names if name != victim]
            for name in job.names:
                job.say(name, "add_up_until_a_death", number)
            time.sleep(0.3 * turn)
            job.kill(victim)
            assert [job.hear(name) for name in left] == [True, True]
            job.check_together(left, [int(name) for name in left])
            job.launch(victim, rank=int(victim))
            assert job.up(victim)["rank"] == int(victim)
            number = job.check_together(job.names, [0, 1, 2])
    finally:
        job.close()


@pytest.mark.thorough
def test_a_job_whose_ranks_have_all_died_begins_anew_by_the_same_commands() -> None:
    job = Job(rejoin="auto")
    try:
        for name in job.names:
            job.kill(name)
        for name in reversed(job.names):  # the others must wait for rank 0, and not join a dead rendezvous
            job.launch(name, rank=int(name))
            time.sleep(0.2)
        assert [job.up(name)["incarnation"] for name in job.names] == [0, 0, 0]
        job.tell(job.names, "watch")
        assert job.check_together(job.names, [0, 1, 2]) == 1
    finally:
        job.close()


@pytest.mark.thorough
def test_a_rank_that_dies_while_the_others_still_meet_comes_in_after_them() -> None:
    job = Job(0, world=3, rejoin="auto")
    try:
        job.launch("0", rank=0)
        job.launch("1", rank=1)
        job.store.wait(["storm/1/card/0", "storm/1/card/1"])  # both wait for rank 2
        job.kill("1")
        job.launch("1", rank=1)
        time.sleep(0.5)
        job.launch("2", rank=2)
        assert [job.up(name)["incarnation"] > 0 for name in ("0", "1", "2")] == [False, True, False]
        job.check_together(["0", "1", "2"], [0, 1, 2])
    finally:
        job.close()


@pytest.mark.thorough
def test_a_job_of_two_survives_the_crash_of_either() -> None:
    """The one that is left is no majority if the other had the lowest rank: the new process must vote in its place."""
    job = Job(2, rejoin="auto")
    try:
        for victim in ("1", "0"):
            job.kill(victim)
            job.launch(victim, rank=int(victim))
            assert job.up(victim)["rank"] == int(victim)
            job.check_together(["0", "1"], [0, 1])
    finally:
        job.close()


@pytest.mark.thorough
def test_two_join_at_once_by_different_ranks_and_get_different_slots(plain: Job) -> None:
    plain.launch("a", join=plain.address["0"])
    plain.launch("b", join=plain.address["2"])
    ranks = [plain.up("a")["rank"], plain.up("b")["rank"]]
    assert len(set(ranks)) == 2
    plain.check_together(["0", "1", "2", "a", "b"], [0, 1, 2, *sorted(ranks)])


@pytest.mark.thorough
def test_a_full_job_says_so() -> None:
    job = Job(2, spare_ranks=1)
    try:
        job.launch("a", join=job.address["1"])
        assert job.up("a")["rank"] == 2
        job.launch("b", join=job.address["0"])
        why = job.refused("b")
        assert "no free slot among its 3" in why
        assert "spare_ranks" in why
    finally:
        job.close()


@pytest.mark.thorough
def test_a_rank_that_lives_is_not_replaced(plain: Job) -> None:
    plain.launch("twin", rank=1, rejoin=True, timeout_s=3.0)
    why = plain.refused("twin")
    assert "rank 1 still answers" in why
    plain.check_together(["0", "1", "2"], [0, 1, 2])


@pytest.mark.thorough
def test_what_is_wrong_is_named(plain: Job) -> None:
    plain.launch("keyed", join=plain.address["0"], key=KEY)
    assert f"the job at {plain.address['0']} has no key, and this process has one" in plain.refused("keyed")
    plain.launch("lost", join="127.0.0.1:1")
    assert "no rank of the job answers: 127.0.0.1:1: " in plain.refused("lost")
    plain.launch("confused", join="somewhere")
    assert 'addresses must be "host:port"' in plain.refused("confused")


def test_a_rank_that_leaves_by_wish_hands_over_and_goes(plain: Job) -> None:
    assert plain.tell(["1"], "leave") == [["handed over", "closed"]]
    plain.check_together(["0", "2"], [0, 2])


@pytest.mark.thorough
def test_sigterm_asks_out_at_once_and_ends_the_process_after_the_grace() -> None:
    job = Job(leave_s=2.0)
    try:
        job.tell(["2"], "listen_for_sigterm")
        began = time.monotonic()
        job.signal("2", signal.SIGTERM)
        job.check_together(["0", "1"], [0, 1])
        assert time.monotonic() - began < 2.0
        assert job.tell(["2"], "leaving") == [True]
        assert job.end("2", 5.0) == 128 + signal.SIGTERM
    finally:
        job.close()
