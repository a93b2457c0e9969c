"""Invariants of a chaos run, such as agreement on views. Each function returns the violations as sentences."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stormtorch_lab.studies.chaos.logs import History, Step
from stormtorch_lab.studies.chaos.timeline import InjectedFault, ProcessExit, undisturbed_until

# Steps of two ranks within this many seconds count as simultaneous.
_SAME_TIME_S = 1.0
# Fingerprints of a shard, in order.
_PRINTS = ("values", "state", "values of the second model", "state of the second model")
# Most violations listed per check, so that one check does not hide the others.
_MOST_PROBLEMS = 20
MOST_ABOVE = 0.02
"""Fraction by which the final validation loss may exceed that of the run without faults."""


@dataclass(frozen=True)
class Check:
    """One invariant and its violations."""

    name: str
    """Invariant in words."""
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing violates it."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "holds": self.holds, "problems": list(self.problems)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """All data of a finished run."""

    history: History
    struck: Sequence[InjectedFault]
    ended: Sequence[ProcessExit]
    start_s: float
    """Time at which all hosts trained and the faults began."""
    finish_s: float
    """Time at which the last fault had ended and the last step was announced."""
    hosts: int
    """Hosts that must be members at the end."""
    patience_s: float
    """Time after a fault within which the training must continue and hosts must return."""
    undisturbed: float | None = None
    """Validation loss of the run without faults: NaN if that failed, None if there was none."""


def check_run(run: Run) -> list[Check]:
    """Checks all invariants."""
    history = run.history
    found = {
        "no hang: training continues after every fault": hangs(run),
        "every affected host comes back": missing_returns(run),
        "no process exits by itself": unexpected_exits(run),
        "no split brain: ranks that step together agree on the members": splits(history),
        "a view's number has one list of members": ambiguous_views(history),
        "no rank acts on a view of which it is not a member": outsiders(history),
        "no rank acts on a view after the next one has begun": superseded(history),
        "exact parameters are bit-identical on all ranks": different_digests(history),
        "step numbers only rise": falling_steps(history),
        "all hosts end at the same step, bit-identical": different_ends(run),
        "standbys are equal to their owners at the end": different_standbys(run),
    }
    if run.undisturbed is not None:
        found[f"the loss is within {MOST_ABOVE:.0%} of that without faults"] = lost_learning(run)
    return [Check(name, _shortened(problems)) for name, problems in found.items()]


def hangs(run: Run) -> list[str]:
    """Pauses of all ranks that exceed the wait limit, outages not counted."""
    inside = [t for t, _ in run.history.frontier if run.start_s <= t]
    problems = []
    # The last step was announced then; a separate check covers the ending.
    for before, after in itertools.pairwise([run.start_s, *inside, *([] if inside else [run.finish_s])]):
        if before < run.finish_s and (gap := _without_outages(before, after, run.struck)) > run.patience_s:
            problems.append(f"{_at(run, before)} no rank made a step for {gap:.1f} s, outages not counted")
    if inside and (gap := _without_outages(inside[-1], run.finish_s, run.struck)) > run.patience_s:
        problems.append(f"{_at(run, inside[-1])} no rank made another step in the {gap:.1f} s until the end")
    return problems


def missing_returns(run: Run) -> list[str]:
    """Hosts that made no step within the wait limit after a fault, though no other fault affected them."""
    problems = []
    for struck in run.struck:
        joins = struck.fault.kind == "join"
        since = struck.began_s if joins else struck.ended_s
        # An outage and a storm affect all hosts alike.
        for host in struck.fault.hosts or range(run.hosts):
            until = min(undisturbed_until(host, since, run.struck), run.finish_s, struck.ended_s if joins else 1e300)
            stepped = run.history.stepped(host, since)
            due = since + run.patience_s
            if due <= until and (stepped is None or stepped > due):
                late = "never again" if stepped is None else f"only after {stepped - since:.1f} s"
                problems.append(f"after {struck.fault.description} {_at(run, since)}, h{host} made steps {late}")
    return problems


def unexpected_exits(run: Run) -> list[str]:
    """Processes that exited though no fault ended them."""
    return [
        f"{_at(run, each.at_s)} the process of h{each.host} exited with status {each.status}"
        + (f": {each.error}" if each.error else "")
        for each in run.ended
    ]


def splits(history: History) -> list[str]:
    """Split brain: ranks that made the same step, or simultaneous steps, in views without a common member."""
    by_step: dict[int, list[Step]] = defaultdict(list)
    by_time: dict[int, list[Step]] = defaultdict(list)
    for step in history.steps:
        by_step[step.step].append(step)
        by_time[int(step.t / _SAME_TIME_S)].append(step)
    return [
        f"{what}, h{first.host} acted with ranks {_ranks(first)} while h{second.host} acted with {_ranks(second)}"
        for what, steps in itertools.chain(
            ((f"at step {number}", steps) for number, steps in by_step.items()),
            ((f"about step {steps[0].step}", steps) for steps in by_time.values()),
        )
        for first, second in _disjoint(steps)
    ]


def ambiguous_views(history: History) -> list[str]:
    """Numbers of views that have two lists of members."""
    known: dict[int, Step] = {}
    problems: dict[int, str] = {}
    for step in history.steps:
        if step.view is None:
            continue
        first = known.setdefault(step.view, step)
        if set(first.members) != set(step.members):
            problems.setdefault(
                step.view,
                f"view {step.view} has the ranks {_ranks(first)} on h{first.host} and {_ranks(step)} on h{step.host}",
            )
    return list(problems.values())


def outsiders(history: History) -> list[str]:
    """Ranks that made steps in a view without themselves."""
    return [
        f"h{step.host} made step {step.step} as rank {step.rank} in view {step.view} of ranks {_ranks(step)}"
        for step in history.steps
        if step.rank not in step.members
    ]


def superseded(history: History) -> list[str]:
    """Steps made in a view after a later view had begun."""
    begins = sorted(
        {(step.view, step.since) for step in history.steps if step.view is not None and step.since is not None}
    )
    # Lowest step at which any later view begins, by view.
    bound: dict[int, tuple[int, int]] = {}
    lowest: tuple[int, int] | None = None
    for number, since in reversed(begins):
        if lowest is not None:
            bound.setdefault(number, lowest)
        if lowest is None or since < lowest[0]:
            lowest = (since, number)
    problems = []
    for step in history.steps:
        if step.view is None or step.view not in bound:
            continue
        since, later = bound[step.view]
        # The view is read after the step, during which the next one may have begun: one step is tolerated.
        if later > step.view and step.step > since + 1:
            problems.append(
                f"h{step.host} made step {step.step} in view {step.view}, though view {later} began at {since}"
            )
    return problems


def different_digests(history: History) -> list[str]:
    """Steps at which exact parameters differed between ranks."""
    by_step: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for process_log in history.process_logs:
        for step, digest in process_log.digests.items():
            by_step[step][digest].append(process_log.name)
    return [
        f"at step {step}: " + ", ".join(f"{digest} on {' and '.join(names)}" for digest, names in found.items())
        for step, found in sorted(by_step.items())
        if len(found) > 1
    ]


def falling_steps(history: History) -> list[str]:
    """Processes whose step numbers did not rise."""
    return [
        f"{process_log.name} made step {after.step} after step {before.step}"
        for process_log in history.process_logs
        for before, after in itertools.pairwise(process_log.steps)
        if after.step <= before.step
    ]


def different_ends(run: Run) -> list[str]:
    """Hosts that did not reach the last step, or ended with another step or digest."""
    problems = []
    ends = {}
    for host in range(run.hosts):
        process_logs = run.history.of_host(host)
        if not process_logs or process_logs[-1].ended_at is None:
            error = process_logs[-1].error if process_logs else None
            problems.append(f"h{host} did not reach the end" + (f": {error}" if error else ""))
        else:
            ends[host] = (
                process_logs[-1].ended_at,
                process_logs[-1].digests.get(process_logs[-1].ended_at),
                process_logs[-1].scale,
            )
    if len(set(ends.values())) > 1:
        problems.append(
            "; ".join(
                f"h{host} ended at step {step} with {digest}" + ("" if scale is None else f" and loss scale {scale:g}")
                for host, (step, digest, scale) in ends.items()
            )
        )
    return problems


def different_standbys(run: Run) -> list[str]:
    """Hosts whose standby of a shard had other values or another optimizer state than the owner."""
    ends = [
        process_log
        for host in range(run.hosts)
        for process_log in run.history.of_host(host)[-1:]
        if process_log.ended_at is not None
    ]
    owners = {(process_log.ended_at, process_log.rank): process_log for process_log in ends}
    problems = []
    for process_log in ends:
        for rank, followed in process_log.shards.items():
            owner = owners.get((process_log.ended_at, rank))
            if owner is None or rank == process_log.rank:
                continue
            # A different number of models also counts as a difference.
            pairs = itertools.zip_longest(owner.shards.get(rank, []), followed)
            what = [name for name, (one, other) in zip(_PRINTS, pairs, strict=False) if one != other]
            if what:
                problems.append(f"{process_log.name} is standby of {owner.name} with other {' and '.join(what)}")
    return problems


def final_loss(history: History) -> float | None:
    """Validation loss at the end: the highest of all ranks; they should be equal."""
    found = [process_log.val_loss for process_log in history.process_logs if process_log.val_loss is not None]
    return max(found, default=None)


def lost_learning(run: Run) -> list[str]:
    """Difference to the run without faults, if it is too large."""
    assert run.undisturbed is not None
    loss = final_loss(run.history)
    if loss is None:
        return ["no rank reached the end, so there is no loss to compare"]
    if math.isnan(run.undisturbed):
        return ["the run without faults did not reach its end, so there is no loss to compare with"]
    above = loss / run.undisturbed - 1
    # Written so that NaN violates it.
    if above <= MOST_ABOVE:
        return []
    return [f"the validation loss is {loss:.4f}, {above:.1%} above that without faults, {run.undisturbed:.4f}"]


def _without_outages(begin: float, end: float, struck: Sequence[InjectedFault]) -> float:
    """Length of an interval minus the outages in it."""
    outages = (each for each in struck if each.fault.kind == "outage")
    return end - begin - sum(max(min(end, each.ended_s) - max(begin, each.began_s), 0.0) for each in outages)


def _disjoint(steps: Sequence[Step]) -> list[tuple[Step, Step]]:
    """First pair of steps whose members are disjoint, if any."""
    kinds = {frozenset(step.members): step for step in steps}
    for (members, first), (others, second) in itertools.combinations(kinds.items(), 2):
        if not members & others:
            return [(first, second)]
    return []


def _shortened(problems: Sequence[str]) -> tuple[str, ...]:
    more = len(problems) - _MOST_PROBLEMS
    return (*problems[:_MOST_PROBLEMS], *([f"and {more} more of this kind"] if more > 0 else []))


def _ranks(step: Step) -> str:
    return ",".join(map(str, step.members))


def _at(run: Run, t: float) -> str:
    return f"at {t - run.start_s:.1f} s"
