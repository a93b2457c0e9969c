"""Invariants of chaos, on made-up histories: each violation is found, and correct runs pass."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stormtorch_lab.studies.chaos import invariants
from stormtorch_lab.studies.chaos.faults import Fault
from stormtorch_lab.studies.chaos.invariants import Run, check_run
from stormtorch_lab.studies.chaos.logs import History, ProcessLog, Reader, log_path
from stormtorch_lab.studies.chaos.timeline import InjectedFault, ProcessExit, pause_of, recoveries, return_of

pytestmark = pytest.mark.pure
HOSTS = 3
STEPS = 100
PACE_S = 0.5
# Time of step n is n * PACE_S: the run takes 50 s, and its end is announced at 45 s.


def process_log(host: int, steps: Iterable[int] = range(1, STEPS + 1), number: int = 0, **view: Any) -> ProcessLog:
    """A process that makes these steps at their times."""
    found = ProcessLog(host, number)
    found.add({"t": 0.0, "begin": 0, "host": host, "rank": host})
    for step in steps:
        line = {"t": step * PACE_S, "step": step, "view": 1, "members": [0, 1, 2], "since": 0, "loss": 2.0}
        found.add(line | view)
        if step % 20 == 0:
            found.add({"t": step * PACE_S, "digest": f"d{step}", "step": step})
    return found


def end(found: ProcessLog, val_loss: float = 2.0, digest: str = "d100") -> ProcessLog:
    found.add({"t": 50.0, "end": STEPS, "val_loss": val_loss, "digest": digest})
    return found


def run_of(*process_logs: ProcessLog, struck: Iterable[InjectedFault] = (), **changes: Any) -> Run:
    found = Run(
        history=History(process_logs),
        struck=list(struck),
        ended=[],
        start_s=0.0,
        finish_s=45.0,
        hosts=HOSTS,
        patience_s=5.0,
        undisturbed=2.0,
    )
    return replace(found, **changes)


def violated(run: Run) -> set[str]:
    return {check.name.split(":")[0] for check in check_run(run) if not check.holds}


def struck(kind: str, began_s: float, ended_s: float, *hosts: int) -> InjectedFault:
    return InjectedFault(Fault(kind=kind, at_s=began_s, lasts_s=ended_s - began_s, hosts=hosts), began_s, ended_s)


def whole() -> list[ProcessLog]:
    return [end(process_log(host)) for host in range(HOSTS)]


def without(*gone: range) -> list[int]:
    return [step for step in range(1, STEPS + 1) if not any(step in each for each in gone)]


def test_a_run_in_which_all_is_right_passes() -> None:
    assert violated(run_of(*whole(), struck=[struck("pause", 10, 12, 1)])) == set()


def test_a_training_that_stands_still_is_a_hang_unless_there_is_an_outage() -> None:
    steps = without(range(20, 41))  # nothing from 9.5 s to 20.5 s
    process_logs = [end(process_log(host, steps)) for host in range(HOSTS)]
    stands = {"no hang", "every affected host comes back"}
    assert violated(run_of(*process_logs, struck=[struck("pause", 9.5, 10, 1)])) == stands
    assert violated(run_of(*process_logs, struck=[struck("outage", 9.6, 18)])) == set()
    assert violated(run_of(*process_logs, struck=[struck("outage", 9.6, 12)])) == stands


def test_a_training_that_ends_too_early_is_a_hang() -> None:
    process_logs = [process_log(host, range(1, 50)) for host in range(HOSTS)]
    assert "no hang" in violated(run_of(*process_logs))
    assert "no hang" in violated(run_of(*(process_log(host, ()) for host in range(HOSTS))))


def test_a_host_that_stays_away_is_missed() -> None:
    process_logs = [end(process_log(0)), end(process_log(1)), end(process_log(2, without(range(20, 60))))]
    cut = struck("cut", 9.6, 12, 2)
    assert violated(run_of(*process_logs, struck=[cut])) == {"every affected host comes back"}
    # Struck again before its time was over: it is not missed yet.
    assert violated(run_of(*process_logs, struck=[cut, struck("kill", 14, 27, 2)])) == set()
    assert violated(run_of(*process_logs, struck=[cut], patience_s=20.0)) == set()


def test_after_an_outage_all_hosts_come_back() -> None:
    process_logs = [end(process_log(0)), end(process_log(1)), end(process_log(2, without(range(20, 60))))]
    assert violated(run_of(*process_logs, struck=[struck("outage", 9.6, 12)])) == {"every affected host comes back"}
    # Another fault holds it back: that one has a time of its own.
    held = struck("pause", 9, 29, 2)
    assert violated(run_of(*process_logs, struck=[held, struck("storm", 9.6, 12)])) == set()


def test_a_further_host_must_come_in_before_it_leaves() -> None:
    joins = struck("join", 10, 30, 3)
    assert "every affected host comes back" in violated(run_of(*whole(), struck=[joins]))
    came = process_log(3, range(24, 60), view=None, members=[0, 1, 2, 3])
    assert violated(run_of(*whole(), came, struck=[joins])) == set()


def test_a_process_that_ends_by_itself_is_found() -> None:
    run = run_of(*whole(), ended=[ProcessExit(1, 10.0, 1, "OSError: gone")])
    assert violated(run) == {"no process exits by itself"}


def test_two_sides_that_both_train_are_a_split_with_and_without_numbers() -> None:
    for numbers in ((None, None), (4, 5)):
        process_logs = [
            end(process_log(0, view=numbers[0], since=None, members=[0])),
            *(end(process_log(host, view=numbers[1], since=None, members=[1, 2])) for host in (1, 2)),
        ]
        assert violated(run_of(*process_logs)) == {"no split brain"}


def test_two_sides_at_different_steps_of_the_same_time_are_a_split() -> None:
    slow = ProcessLog(0, 0)
    slow.add({"t": 0.0, "begin": 0, "host": 0, "rank": 0})
    # Its steps are far behind those that the others make at that time, and no step has the same number.
    slow.add({"t": 40.1, "step": 3, "members": [0], "loss": 2.0})
    others = [end(process_log(host, range(40, STEPS + 1), view=None, members=[1, 2])) for host in (1, 2)]
    assert invariants.splits(History([slow, *others]))


def test_one_number_with_two_lists_of_members_is_found() -> None:
    process_logs = [end(process_log(0)), end(process_log(1)), end(process_log(2, members=[1, 2]))]
    assert violated(run_of(*process_logs)) == {"a view's number has one list of members"}


def test_a_rank_that_acts_in_a_view_without_itself_is_found() -> None:
    process_logs = [end(process_log(host, members=[0, 1])) for host in range(HOSTS)]
    assert violated(run_of(*process_logs)) == {"no rank acts on a view of which it is not a member"}


def test_a_rank_that_acts_on_an_old_view_is_found() -> None:
    for late, found in ((52, {"no rank acts on a view after the next one has begun"}), (51, set())):
        process_logs = whole()
        for each in process_logs:
            each.steps = [
                step._replace(view=1 if step.step <= 50 else 2, since=0 if step.step <= 50 else 50)
                for step in each.steps
            ]
        process_logs[2].steps = [
            step._replace(view=1, since=0) if 50 < step.step <= late else step for step in process_logs[2].steps
        ]
        assert violated(run_of(*process_logs)) == found


def test_one_wrong_bit_in_exact_parameters_is_found() -> None:
    process_logs = whole()
    process_logs[1].digests[40] = "other"
    assert violated(run_of(*process_logs)) == {"exact parameters are bit-identical on all ranks"}


def test_exact_parameters_that_were_refused_are_no_violation() -> None:
    process_logs = whole()
    del process_logs[1].digests[40]
    process_logs[1].add({"t": 20.0, "refused": "part 3 of rank 2", "step": 40})
    assert violated(run_of(*process_logs)) == set()


def test_steps_that_fall_are_found() -> None:
    process_logs = whole()
    process_logs[0].steps[30] = process_logs[0].steps[30]._replace(step=20)
    assert violated(run_of(*process_logs)) == {"step numbers only rise"}


def test_a_host_that_does_not_come_to_the_end_or_to_another_is_found() -> None:
    name = "all hosts end at the same step, bit-identical"
    assert violated(run_of(*whole()[:2], process_log(2))) == {name}
    assert violated(run_of(*whole()[:2])) == {name}
    assert name in violated(run_of(*whole()[:2], end(process_log(2), digest="other")))


def test_a_host_that_ends_with_another_loss_scale_is_found() -> None:
    process_logs = whole()
    process_logs[1].scale = 1024.0
    assert violated(run_of(*process_logs)) == {"all hosts end at the same step, bit-identical"}


def test_a_standby_that_is_not_equal_to_its_owner_is_found() -> None:
    process_logs = whole()
    for each in process_logs:
        before = (each.host - 1) % HOSTS
        each.add(
            {"t": 50.0, "end": STEPS, "val_loss": 2.0, "digest": "d100"}
            | {"shards": {str(each.host): [each.host, 7, 5, 6], str(before): [before, 7, 5, 6]}}
        )
    assert violated(run_of(*process_logs)) == set()
    for followed, what in (
        ([1, 8, 5, 6], "state"),
        ([1, 7, 4, 6], "values of the second model"),
        ([1, 7], "values of the second model and state of the second model"),
    ):
        process_logs[2].shards[1] = followed
        assert invariants.different_standbys(run_of(*process_logs)) == [f"h2 is standby of h1 with other {what}"]


def test_a_loss_that_is_too_high_is_found_and_a_lower_one_is_not() -> None:
    name = "the loss is within 2% of that without faults"
    for loss, found in ((2.039, set()), (2.05, {name}), (1.5, set()), (float("nan"), {name})):
        assert violated(run_of(*(end(process_log(host), loss) for host in range(HOSTS)))) == found
    assert violated(run_of(*whole(), undisturbed=None)) == set()
    assert violated(run_of(*whole(), undisturbed=float("nan"))) == {name}


def test_hundreds_of_problems_are_counted_and_not_all_told() -> None:
    process_logs = [end(process_log(host, members=[0, 1])) for host in range(HOSTS)]
    (check,) = (check for check in check_run(run_of(*process_logs)) if not check.holds)
    assert len(check.problems) == 21
    assert check.problems[-1] == "and 80 more of this kind"


# --- recoveries ---------------------------------------------------------------------------------------------------


def test_a_pause_is_the_longest_time_without_a_step_on_any_host() -> None:
    steps = without(range(21, 26))  # 10 s to 13 s
    history = History([process_log(0, steps), process_log(1, steps), process_log(2, without(range(20, 40)))])
    kill = struck("kill", 10.2, 11, 2)
    assert pause_of(history, kill, [kill]) == pytest.approx(3.0)
    assert return_of(history, kill, [kill]) == pytest.approx(9.0)
    again = struck("cut", 15, 17, 2)
    assert return_of(history, kill, [kill, again]) is None
    assert return_of(history, again, [kill, again]) == pytest.approx(3.0)


def test_the_pause_of_an_outage_counts_from_its_end_and_is_nobody_elses() -> None:
    steps = without(range(21, 40))  # 10 s to 20 s
    history = History([process_log(host, steps) for host in range(HOSTS)])
    outage, before = struck("outage", 10.1, 18.5), struck("pause", 8, 9, 1)
    assert pause_of(history, outage, [before, outage]) == pytest.approx(1.5)
    assert pause_of(history, before, [before, outage]) == pytest.approx(0.5)


def test_a_training_that_never_goes_on_has_no_pause() -> None:
    history = History([process_log(host, range(1, 21)) for host in range(HOSTS)])
    for kind in ("kill", "outage"):
        (recovery,) = recoveries(history, [struck(kind, 10.2, 11, 2)])
        assert recovery.pause_s is None


# --- logs ---------------------------------------------------------------------------------------------------------


def test_logs_are_read_while_they_grow_and_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    assert reader.read().last_step == 0
    text = json.dumps({"t": 1.0, "begin": 4, "host": 1, "rank": 1}) + "\n"
    step = json.dumps({"t": 2.0, "step": 5, "view": 3, "members": [0, 1], "since": 2, "loss": 2.5}) + "\n"
    path = log_path(tmp_path, 1, 2)
    path.write_text(text + step[:20])
    assert reader.read().last_step == 0
    path.write_text(text + step + json.dumps({"t": 3.0, "error": "OSError"}) + "\n")
    (found,) = reader.read().process_logs
    assert (found.name, found.rank, found.error) == ("h1 (process 3)", 1, "OSError")
    assert [(each.step, each.view, each.members, each.since) for each in found.steps] == [(5, 3, (0, 1), 2)]
    assert reader.read().stepped(1, 1.5) == 2.0
    assert reader.read().stepped(1, 2.0) is None
