"""The verdict: one sentence for each kind of problem, with the right one first."""

from typing import Any

import pytest

from records import START, job_of, make_records
from stormtorch.telemetry.records import Record
from stormtorch.watch.cost import network_cost
from stormtorch.watch.diagnoses import JobDiagnosis, Level
from stormtorch.watch.job_snapshot import JobSnapshot
from stormtorch.watch.verdict import judge

pytestmark = pytest.mark.pure


def judged(records: dict[int, list[Record]], now: float = START + 21) -> list[JobDiagnosis]:
    return judge(JobSnapshot(job_of(records), now))


def first(now: float = START + 21, **how: Any) -> JobDiagnosis:
    return judged(make_records(**how), now)[0]


def test_a_healthy_job_is_well() -> None:
    found = judged(make_records(8))
    assert [each.kind for each in found] == ["well"]
    assert found[0].level is Level.GOOD
    assert found[0].sentence == (
        "All is well: 8 ranks, 80 steps, 110 ms a step, 0.01 % lost, 9.1 % of a step waits for the network."
    )


def test_a_host_that_loses_what_it_receives_is_named_with_a_remedy() -> None:
    found = judged(make_records(loss=lambda sender, receiver: 0.12 if receiver == 1 else 0.001))
    assert found[0].sentence == (
        "Host b (rank 1) loses 12 % of what it receives, from every sender: check its cable, its switch port or its "
        "receive buffer (net.core.rmem_max)."
    )
    assert found[0].links == ((0, 1), (2, 1), (3, 1))
    assert not {"sender", "link", "loss"} & {each.kind for each in found}, "one cause has one sentence"


def test_all_ranks_of_a_bad_host_are_one_culprit() -> None:
    found = first(
        world=12,
        host=lambda rank: f"node-{rank // 4}",
        loss=lambda sender, receiver: 0.08 if receiver // 4 == 1 != sender // 4 else 0.0,
    )
    assert found.text == "Host node-1 (ranks 4 to 7) loses 8 % of what it receives, from every sender"


def test_a_buffer_that_overflowed_is_what_to_change() -> None:
    found = first(
        loss=lambda sender, receiver: 0.12 if receiver == 1 else 0.001,
        links_health=lambda rank: {"overflow": 4000 if rank == 1 else 0},
    )
    assert "its receive buffer overflowed 4,000 times, so raise net.core.rmem_max" in found.remedy


def test_a_host_whose_sendings_are_lost_is_named() -> None:
    found = first(loss=lambda sender, receiver: 0.2 if sender == 2 else 0.0)
    assert (found.kind, found.ranks) == ("sender", (2,))
    assert found.text == "All receivers lose 20 % of what host c (rank 2) sends"


def test_between_two_hosts_the_direction_is_named_and_neither_end_accused() -> None:
    found = first(world=4, host=lambda rank: "ab"[rank // 2], loss=lambda s, r: 0.1 if s < 2 <= r else 0.0)
    assert found.kind == "direction"
    assert found.text == "10 % is lost on the way from host a (ranks 0, 1) to host b (ranks 2, 3)"


def test_one_bad_link_is_named_with_what_the_others_lose() -> None:
    found = first(world=8, loss=lambda sender, receiver: 0.3 if (sender, receiver) == (2, 5) else 0.001)
    assert found.text == "The link 2 -> 5 loses 30 %, the others 0.1 %"
    assert found.remedy == "check what only c and f share: a cable, a route, a firewall's limit"
    assert (found.level, found.links) == (Level.BAD, ((2, 5),))


def test_a_link_that_loses_both_ways_is_one_link() -> None:
    found = first(world=8, loss=lambda sender, receiver: 0.3 if {sender, receiver} == {2, 5} else 0.0)
    assert found.text == "The link 2 <-> 5 loses 30 % and 30 %, the others nothing"


def test_loss_of_all_links_has_no_culprit_but_a_price() -> None:
    found = first(world=8, loss=lambda sender, receiver: 0.1 + 0.01 * (sender % 2))
    assert (found.kind, found.level) == ("loss", Level.WARN)
    assert found.text.startswith("All links lose about 10 %, none much more than the others; theory predicts about ")
    assert found.text.endswith(" % more steps")


def test_noise_of_healthy_links_is_no_finding() -> None:
    assert first(world=8, loss=lambda sender, receiver: 0.0002 * (sender + 1)).kind == "well"


def test_a_slow_rank_is_named_with_what_it_costs() -> None:
    found = first(compute_s=lambda rank: 0.84 if rank == 3 else 0.4)
    assert found.text == ("Host d (rank 3) computes 2.1x as long as the others, and they wait 440 ms a step for it")
    assert (found.level, found.ranks) == (Level.BAD, (3,))


def test_a_rank_that_is_a_little_slower_is_not_worth_a_sentence() -> None:
    assert first(compute_s=lambda rank: 0.11 if rank == 3 else 0.1).kind == "well"


def test_waiting_for_the_network_is_said_with_how_much_of_the_line_is_used() -> None:
    found = first(wait_s=0.3)
    assert (found.kind, found.level) == ("network", Level.BAD)
    assert found.text == "75 % of a step is waiting for the network, which is used at 1.7 % of its rate"


def test_of_a_tiny_model_the_fixed_cost_is_named_and_not_blamed() -> None:
    tiny: dict[str, Any] = {
        "compute_s": lambda rank: 0.001,
        "wait_s": 0.003,
        "rank_parameters": 650,
        "host": lambda rank: "a",
    }
    found = first(**tiny)
    assert found.level is Level.GOOD
    assert found.text.startswith(
        "A step of 650 parameters takes 4.00 ms, 75 % of it for exchanges: that is their fixed"
    )
    assert first(**tiny | {"rank_parameters": 650_000}).level is Level.BAD


def test_on_one_machine_it_is_the_cores_that_ranks_wait_for() -> None:
    found = first(wait_s=0.3, host=lambda rank: "a", rate=lambda s, r: 0.0)
    assert found.text == "75 % of a step is waiting for other ranks on the same machine"
    assert "OMP_NUM_THREADS" in found.remedy
    # Ranks that hardly compute do not crowd each other.
    found = first(wait_s=0.3, host=lambda rank: "a", rate=lambda s, r: 0.0, links_cpu_s=lambda rank: 0.1)
    assert "cores together, so see what else keeps this machine busy" in found.remedy


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"rate": lambda s, r: 1e6 if 1 in (s, r) else 5e7}, "rate", "Every link of host b (rank 1) carries 8"),
        ({"rate": lambda s, r: 1e6 if (s, r) == (0, 2) else 5e7}, "rate", "The link 0 -> 2 carries 8 Mbit/s"),
        ({"rtt_s": lambda s, r: 0.08 if (s, r) == (0, 2) else 1e-3}, "rtt", "The link 0 -> 2 takes 80.0 ms"),
        ({"pair_drift": 4e-6}, "drift", "Replicas drift apart by 2.0x the theoretical bound"),
        ({"guarded": 2}, "guard", "The guard makes 50 % of the steps exact"),
        ({"rank_stormtorch": lambda r: f"0.1.{r == 2:d}"}, "versions", "Host c (rank 2) runs stormtorch 0.1.1"),
        ({"links_quorum": lambda rank: rank != 1}, "quorum", "Host b (rank 1) reaches no majority"),
    ],
)  # fmt: skip
def test_other_trouble_has_a_sentence_each(how: dict[str, Any], kind: str, words: str) -> None:
    found = first(world=6, **how)
    assert found.kind == kind
    assert found.text.startswith(words)
    assert found.remedy


def test_short_round_trips_are_not_compared() -> None:
    assert first(world=6, rtt_s=lambda s, r: 1e-3 if (s, r) == (0, 2) else 1e-4).kind == "well"


def test_a_long_wait_names_who_does_not_wait() -> None:
    waits = {"call": "backward()", "seconds": 33.0, "peers": [0, 1, 2, 3]}
    found = first(links_waits=lambda rank: None if rank == 2 else waits)
    assert found.text == "Ranks 0, 1, 3 have waited for 33.0 s in backward() for rank 2"
    assert found.ranks == (2,)


def test_a_rank_that_died_is_named_while_the_others_train_on() -> None:
    records = make_records(until=lambda rank: 8 if rank == 2 else None)
    for rank in (0, 1, 3):
        view = {"kind": "view", "time": START + 10, "number": 2, "step": 40, "members": [0, 1, 3], "left": [2]}
        records[rank].append(view)
    found = judged(records)
    assert found[0].text == "Host c (rank 2) died or was cut off after step 31, and 3 of 4 ranks train on"
    assert "start it again with the same command" in found[0].remedy
    ended = [{"kind": "end", "time": START + 21, "step": 80, "why": "done"}]
    found = judged({rank: mine + ended * (rank != 2) for rank, mine in records.items()})
    assert found[0].text.endswith("3 of 4 ranks went on to the end")
    why = "PeerSilent: rank {}: nothing was received from rank 2\N{HORIZONTAL ELLIPSIS}"
    failed = {rank: [{"kind": "end", "time": START + 21, "step": 80, "why": why.format(rank)}] for rank in (0, 1, 3)}
    found = judged({rank: mine + failed.get(rank, []) for rank, mine in records.items()})
    assert found[0].text.endswith("3 of 4 ranks went on to an error")
    assert found[1].sentence == (
        "Ranks 0, 1, 3 failed at step 79: PeerSilent: nothing was received from rank 2\N{HORIZONTAL ELLIPSIS}"
    )


def test_a_rank_that_stops_telling_is_noticed_before_a_view_says_so() -> None:
    found = first(now=START + 41, until=lambda rank: None if rank == 2 else 40)
    assert found.text == "Host c (rank 2) has not reported for 21.0 s"


def test_a_slow_step_is_not_silence() -> None:
    records = make_records(compute_s=lambda rank: 30.0)
    assert judged(records, START + 100)[0].kind == "well"
    assert judged(records, START + 200)[0].kind == "silent"


def test_a_job_that_was_killed_is_told_from_one_that_ended() -> None:
    found = first(now=START + 600)
    assert found.text == ("No rank has reported for 580 s, and none has ended; the last step was 79")


def test_an_error_is_quoted() -> None:
    records = make_records()
    records[1].append({"kind": "end", "time": START + 20, "step": 80, "why": "CUDA out of memory."})
    assert judged(records)[0].text == "Host b (rank 1) failed at step 79: CUDA out of memory"


def test_a_finished_run_is_judged_as_a_whole() -> None:
    records = make_records(loss=lambda sender, receiver: 0.2 if receiver == 1 else 0.0)
    for mine in records.values():
        last = {**mine[-1], "links": {peer: {**link, "loss": 0.0} for peer, link in mine[-1]["links"].items()}}
        mine[-1:] = [last, {"kind": "end", "time": START + 20, "step": 80, "why": "done"}]
    found = judged(records, START + 9999)
    assert found[0].kind == "receiver", "that the last moment was fine does not make the run so"
    assert judged(make_records(), START + 21)[0].text.startswith("All is well")


def test_nothing_told_is_said_so() -> None:
    found = judged({})
    assert (found[0].kind, found[0].level) == ("empty", Level.IDLE)


def test_the_worst_comes_first_and_the_rest_follow() -> None:
    found = judged(
        make_records(
            6,
            loss=lambda sender, receiver: 0.3 if (sender, receiver) == (2, 5) else 0.001,
            rtt_s=lambda s, r: 0.08 if (s, r) == (0, 2) else 1e-3,
            compute_s=lambda rank: 0.5 if rank == 3 else 0.1,
        )
    )
    assert [each.kind for each in found] == ["slow", "link", "rtt"]


def test_theory_prices_what_is_missing_by_the_policy() -> None:
    how: dict[str, Any] = {"loss": lambda sender, receiver: 0.1, "lead": 0.1}
    prices = [
        network_cost(JobSnapshot(job_of(make_records(8, rank_policy=policy, **how)), START + 21)).more_steps or 0.0
        for policy in ("BoundedDrift", "ModelAveraging")
    ]
    assert 0.05 < prices[0] < 0.2 < prices[1]
