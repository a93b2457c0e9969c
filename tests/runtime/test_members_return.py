"""Members by themselves: how a rank that was lost asks to be let in, and how the others answer."""

import gc
import json
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from conftest import store_of_threads
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

from member_ranks import Clock, Job, hear
from stormtorch import StormError
from stormtorch.collectives import Group, all_reduce
from stormtorch.runtime import members as module
from stormtorch.runtime.members import Epoch, Members

pytestmark = pytest.mark.pure

NOTICE_STEPS = 3
"""Steps from an answer to the epoch that it announces."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def job(clock: Clock) -> Iterator[Job]:
    job = Job(3, store_of_threads())
    yield job
    job.close()


def walk(ranks: list[Members], begun: list[Epoch], step: int) -> Callable[[], None]:
    """One step of several ranks: each looks for those that return, and begins the epoch that it finds."""

    def look() -> None:
        for each in ranks:
            epoch = each.look(step)
            if epoch is not None:
                each.begin(epoch)
                begun.append(epoch)

    return look


def walks(ranks: list[Members], begun: list[Epoch], first: int = 7, steps: int = 8) -> list[Callable[[], None]]:
    return [walk(ranks, begun, step) for step in range(first, first + steps)]


def summed(job: Job, name: str, ranks: list[int]) -> list[float]:
    """What ranks find when each adds its number, on a group of a new name."""
    tensors = [torch.full((100,), float(rank)) for rank in ranks]
    coming = [
        all_reduce(Group(job.transports[rank], ranks, name=name), tensor)
        for rank, tensor in zip(ranks, tensors, strict=True)
    ]
    for each in coming:
        each.wait()
    return [float(each[0]) for each in tensors]


# --- as it should go --------------------------------------------------------------------------------------------------


def test_a_process_that_takes_a_place_is_let_in_by_all_at_the_same_step(job: Job, clock: Clock) -> None:
    others = [job.members(0), job.members(1)]
    assert not any(each.restarted for each in others)
    hear(others[0], 1, step=6)
    hear(others[1], 0, step=6)
    new = job.restart(2)
    assert new.restarted
    begun: list[Epoch] = []
    clock.meanwhile = walks(others, begun)
    epoch = new.ask_in()
    new.begin(epoch)
    assert begun == [epoch, epoch]
    assert epoch == Epoch(1, 7 + NOTICE_STEPS, [0, 1, 2], {2: True}, 0)
    assert str(epoch) == "epoch 1 begins at step 10: rank 2 as a new process returns"
    for each in (*others, new):
        assert (each.epoch, each.lowest, each.cut_off, each.restarted) == (1, 0, False, False)
    assert [each.incarnation(2) for each in job.transports] == [1, 1, 1]
    assert summed(job, "epoch 1", [0, 1, 2]) == [3.0] * 3
    assert job.store.add("stormtorch/t/here/1", 0) == 2  # those that did not return
    assert hear(others[0], 1, 2, step=10) == ([], ["rank 2 is back"])
    hear(others[1], 2, step=10)
    assert not others[1].cut_off  # rank 2 counts: two of three are no minority
    assert hear(new, 0, 1, step=10) == ([], [])


def test_a_rank_that_was_cut_off_waits_for_a_sign_of_life_and_returns_as_what_it_is(job: Job, clock: Clock) -> None:
    others, lost = [job.members(0), job.members(1)], job.members(2)
    hear(others[0], 1)
    hear(others[1], 0)
    hear(lost)
    begun: list[Epoch] = []
    alone: list[bool] = []
    clock.meanwhile = [
        *[lambda: alone.append(job.store.check(["stormtorch/t/request/0/2"]))] * 5,
        lambda: summed(job, "life", [0, 1, 2]),
        *walks(others, begun),
    ]
    cut_off = [lost.cut_off]
    epoch = lost.ask_in()
    lost.begin(epoch)
    assert [*cut_off, lost.cut_off] == [True, False]
    assert alone == [False] * 5  # nothing was heard, and so nothing asked
    assert epoch.joins == {2: False} and begun == [epoch, epoch]
    assert str(epoch) == "epoch 1 begins at step 10: rank 2 returns"
    assert [each.incarnation(2) for each in job.transports] == [1, 1, 1]
    assert summed(job, "epoch 1", [0, 1, 2]) == [3.0] * 3


def test_only_the_lowest_rank_that_is_there_answers(job: Job, clock: Clock) -> None:
    low, high = job.members(1), job.members(2)
    hear(low, 2)
    hear(high, 1)
    new = job.restart(0)
    clock.meanwhile = [lambda: high.look(4), lambda: seen.append(job.store.check(["stormtorch/t/epoch/1"]))]
    seen: list[bool] = []
    begun: list[Epoch] = []
    clock.meanwhile += walks([high, low], begun, first=5)
    epoch = new.ask_in()
    assert seen == [False]
    assert epoch.root == 1 and epoch.members == [0, 1, 2]
    assert len(begun) == 2


def test_nobody_looks_into_the_store_while_nobody_is_missing(job: Job, clock: Clock) -> None:
    first = job.members(0)
    job.store.set("stormtorch/t/request/0/2", json.dumps({"restarted": True}))
    assert first.look(1) is None
    assert not job.store.check(["stormtorch/t/epoch/1"])
    hear(first, 1)
    assert first.look(2) is None
    assert job.store.check(["stormtorch/t/epoch/1"])
    assert [first.look(step) is not None for step in (3, 4, 5, 6)] == [False, False, True, False]


def test_two_ranks_return_at_once_or_one_while_the_other_is_still_dead(job: Job, clock: Clock) -> None:
    first = job.members(0)
    hear(first, 1, step=0)
    hear(first, step=1)
    one = job.restart(1)
    begun: list[Epoch] = []
    clock.meanwhile = walks([first], begun)
    epoch = one.ask_in()
    assert (epoch.members, epoch.joins) == ([0, 1], {1: True})
    one.begin(epoch)
    assert hear(first, 1, step=10) == ([2], ["rank 1 is back"])
    assert hear(one, 0, step=10) == ([2], ["rank 2 is missing"])
    # Both of them, as the one that had returned dies again.
    hear(first, step=11)
    one, two = job.restart(1), job.restart(2)
    answers: list[Epoch] = []
    clock.meanwhile = [lambda: answers.append(two.ask_in()), *walks([first], begun, first=12)]
    epoch = one.ask_in()
    assert (epoch.number, epoch.members, epoch.joins) == (2, [0, 1, 2], {1: True, 2: True})
    assert answers == [epoch]


# --- as it may go -----------------------------------------------------------------------------------------------------


def test_an_answer_to_a_process_that_died_since_is_none_to_the_next_one(job: Job, clock: Clock) -> None:
    others = [job.members(0), job.members(1)]
    hear(others[0], 1)
    hear(others[1], 0)
    begun: list[Epoch] = []
    first_try = job.restart(2)
    clock.meanwhile = walks(others, begun)
    assert first_try.ask_in().number == 1  # and dies before it begins
    hear(others[0], 1)
    hear(others[1], 0)
    second_try = job.restart(2)
    clock.meanwhile = walks(others, begun, first=20)
    epoch = second_try.ask_in()
    assert (epoch.number, epoch.step, epoch.joins) == (2, 20 + NOTICE_STEPS, {2: True})


def test_an_epoch_for_another_rank_is_waited_out_and_asked_after_again(job: Job, clock: Clock) -> None:
    first = job.members(0)
    hear(first, 1)
    hear(first)
    one = job.restart(1)
    two = job.restart(2)
    begun: list[Epoch] = []
    answers: list[Epoch] = []
    walking = walks([first], begun, steps=12)
    # Rank 1 is answered before rank 2 asks.
    clock.meanwhile = [walking[0], lambda: answers.append(two.ask_in()), *walking[1:]]
    answers.append(one.ask_in())
    assert [each.joins for each in begun] == [{1: True}, {2: True}]
    assert answers == begun[::-1]


def test_a_rank_whose_request_came_too_late_for_an_answer_asks_again(job: Job, clock: Clock) -> None:
    first = job.members(0)
    hear(first, 1)
    hear(first)
    two = job.restart(2)

    def answer_another() -> None:  # while the request of rank 2 was on its way
        answer = {"step": 8, "members": [0, 1], "joins": {"1": True}, "root": 0}
        job.store.set("stormtorch/t/epoch/1", json.dumps(answer))
        job.store.set("stormtorch/t/latest", "1")

    begun: list[Epoch] = []
    clock.meanwhile = [answer_another, *walks([first], begun, steps=10)]
    assert two.ask_in() == begun[1]
    assert [each.joins for each in begun] == [{1: True}, {2: True}]


def test_a_rank_that_hears_nothing_gives_up_in_the_end(job: Job, clock: Clock) -> None:
    lost = job.members(2, give_up_s=5.0)
    began = clock.now_s
    with pytest.raises(StormError, match="rank 2: nobody has let it in for 5 s"):
        lost.ask_in()
    assert 5.0 <= clock.now_s - began < 5.2


def test_a_rank_that_returns_does_not_wait_for_one_that_died_on_the_way(job: Job, clock: Clock) -> None:
    new = job.restart(2)
    answer = {"step": 9, "members": [0, 1, 2], "joins": {"2": True}, "root": 0}

    def first() -> None:  # and rank 1 will not come
        job.store.set("stormtorch/t/epoch/1", json.dumps(answer))
        job.store.add("stormtorch/t/here/1", 1)

    clock.meanwhile = [first]
    began = clock.now_s
    assert new.ask_in().number == 1
    assert 0.1 * 60.0 < clock.now_s - began < 0.1 * 60.0 + 1.0


def test_a_rank_that_nobody_lets_in_gives_up_and_says_so(job: Job, clock: Clock) -> None:
    job.restart(2)
    new = job.members(2, give_up_s=5.0)
    began = clock.now_s
    with pytest.raises(StormError, match=r"rank 2: nobody has let it in for 5 s \(give_up_s\)") as raised:
        new.ask_in()
    assert raised.value.culprit == 2
    assert 5.0 <= clock.now_s - began < 5.2
    assert json.loads(job.store.get("stormtorch/t/request/0/2")) == {"restarted": True}


def test_ranks_go_on_when_the_store_has_died_and_nobody_can_return(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    job = Job(3, TCPStore("127.0.0.1", master.port, is_master=False, timeout=timedelta(seconds=20)))
    try:
        first, new = job.members(0), job.restart(2)
        del master
        gc.collect()
        assert first.look(0) is None and not caplog.messages  # nobody is missing
        hear(first, 1)
        assert first.look(1) is None
        assert first.look(2) is None
        (said,) = [text for text in caplog.messages if "cannot look for ranks that return" in text]
        assert said.startswith("rank 0: ")
        assert hear(first, 1, step=2) == ([2], [])
        with pytest.raises(StormError, match="rank 2: it is cut off, and the store does not answer") as raised:
            new.ask_in()
        assert raised.value.culprit == 2
    finally:
        job.close()


def test_trainings_of_other_names_do_not_meet(job: Job, clock: Clock) -> None:
    first = Members(Group(job.transports[0]), "another", 100, 60.0)
    hear(first, 1)
    job.store.set("stormtorch/t/request/0/2", json.dumps({"restarted": True}))
    assert first.look(1) is None
    assert not any(job.store.check([f"stormtorch/{name}/epoch/1"]) for name in ("t", "another"))
