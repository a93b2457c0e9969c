"""The verdict: diagnoses of a job in plain sentences, each with a culprit and a remedy, the worst first."""

from collections import defaultdict
from statistics import median

from stormtorch.telemetry.text import time_text
from stormtorch.watch.cost import NetworkCost, network_cost
from stormtorch.watch.diagnoses import JobDiagnosis, Level, does, percent, where
from stormtorch.watch.job import named
from stormtorch.watch.job_snapshot import JobSnapshot, State
from stormtorch.watch.verdict_links import losses, slow_or_long_links

# A rank is slow if it computes longer than the others by this factor (ranks on equal machines differ by about a
# tenth), and if the others wait for it for at least this share of a step.
_SLOWER = 1.25
_WAITED = 0.1
# Waiting for the network is a warning above a quarter of a step, and a problem above a half.
_NETWORK, _NETWORK_MOST = 0.25, 0.5
# The bound holds on average; single samples go above it by some tens of percent.
_OVER_BOUND = 1.5
# A step has several exchanges, and each has a fixed cost of milliseconds, however small it is.
_TINY_MODEL, _SHORT_STEP_S = 200_000, 0.03
# Ranks that use fewer cores than this in total do not wait for each other's cores.
_ONE_CORE = 0.8
# Share of steps that the convergence guard made exact. Some at the beginning of a training are usual.
_GUARDED = 0.2
# A longer wait than this is not part of a normal step.
_HANGS_S = 10.0
# Records come once a second and ranks step together: one that is behind by more seconds of steps than this is late.
_BEHIND_S = 15.0


def judge(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    """Returns the diagnoses of a job, the most important first; at least one."""
    if job_snapshot.state is State.EMPTY:
        words = "No rank has reported yet"
        return [
            JobDiagnosis(
                level=Level.IDLE, kind="empty", text=words, remedy="records begin with the first steps of a job"
            )
        ]
    found = [*_ends(job_snapshot), *_silence(job_snapshot), *_hangs(job_snapshot), *_versions(job_snapshot)]
    found += [*losses(job_snapshot), *_slow_rank(job_snapshot), *slow_or_long_links(job_snapshot)]
    cost = network_cost(job_snapshot)
    found += [*_network(job_snapshot, cost), *_drift(job_snapshot), *_guard(job_snapshot), *_behind(job_snapshot)]
    order = {Level.BAD: 0, Level.WARN: 1, Level.GOOD: 2, Level.IDLE: 3}
    found.sort(key=lambda each: (order[each.level], -each.weight))
    return found or [_well(job_snapshot, cost)]


# --- ranks that end, die or hang -------------------------------------------------------------------------------------


def _ends(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, process in job_snapshot.everyone.items():
        if job_snapshot.states[rank] is State.FAILED:
            step = f" at step {process.step:,}" if process.step is not None else ""
            # Errors begin with the rank that raised them; the sentence names it already.
            alike[f"failed{step}: {(process.why or '').replace(f'rank {rank}: ', '', 1)}"].append(rank)
    return [
        JobDiagnosis(
            level=Level.BAD,
            kind="failed",
            text=f"{where(job_snapshot, tuple(ranks))} {words.rstrip('.')}",
            ranks=tuple(ranks),
            weight=9.0,
        )
        for words, ranks in list(alike.items())[:3]
    ]


def _silence(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    states = job_snapshot.states
    found = []
    gone = tuple(rank for rank, state in states.items() if state is State.GONE)
    silent = tuple(rank for rank, state in states.items() if state is State.SILENT)
    left = len(states) - len(gone) - len(silent)
    running = State.RUNNING in states.values()
    if gone:
        step = max(job_snapshot.everyone[rank].step or 0 for rank in gone)
        words = f"{does(where(job_snapshot, gone), 'died or was', 'died or were')} cut off after step {step:,}"
        failed = State.FAILED in states.values()
        if left:
            after = "train on" if running else "went on to an error" if failed else "went on to the end"
            words += f", and {left} of {len(states)} ranks {after}"
        remedy = "start it again with the same command, and it rejoins" if running else ""
        level = Level.BAD if running or failed else Level.WARN
        # A death comes before the errors that follow from it.
        weight = 9.5 if failed else 5.0
        found.append(JobDiagnosis(level=level, kind="gone", text=words, remedy=remedy, ranks=gone, weight=weight))
    if silent:
        quiet = time_text(job_snapshot.now - max(job_snapshot.everyone[rank].arrived for rank in silent))
        if running:
            words = f"{does(where(job_snapshot, silent), 'has', 'have')} not reported for {quiet}"
            remedy = "check that the process still runs, and that its folder or its port is reachable from here"
        else:
            step = max(job_snapshot.everyone[rank].step or 0 for rank in silent)
            words = f"No rank has reported for {quiet}, and none has ended; the last step was {step:,}"
            remedy = "it was killed, or hangs: look at its output, or attach py-spy to one of its processes"
        found.append(JobDiagnosis(level=Level.BAD, kind="silent", text=words, remedy=remedy, ranks=silent, weight=6.0))
    return found


def _hangs(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    if job_snapshot.state is not State.RUNNING:
        return []
    found = []
    live = job_snapshot.live
    alone = tuple(rank for rank, process in live.items() if not process.quorum)
    if alone:
        words = f"{does(where(job_snapshot, alone), 'reaches', 'reach')} no majority of the ranks, and training waits"
        remedy = "start the missing ranks, or find out why their datagrams do not arrive (stormtorch doctor)"
        found.append(JobDiagnosis(level=Level.BAD, kind="quorum", text=words, remedy=remedy, ranks=alone, weight=8.0))
    waiting = {rank: process for rank, process in live.items() if process.waits_s >= _HANGS_S}
    if waiting:
        # A rank that is waited for and does not wait itself holds up the others.
        late = {peer for process in waiting.values() for peer in process.waits_for} - waiting.keys()
        longest = max(waiting.values(), key=lambda process: process.waits_s)
        call = f" in {longest.waits_in}" if longest.waits_in else ""
        words = (
            f"{does(where(job_snapshot, tuple(waiting)), 'has', 'have')} waited for {time_text(longest.waits_s)}{call}"
        )
        if late and len(late) < len(live):
            words += f" for {named(tuple(late))}"
        remedy = (
            "see where that rank is (py-spy dump)"
            if late
            else "the ranks wait for each other: make sure that all make the same calls"
        )
        found.append(
            JobDiagnosis(level=Level.BAD, kind="hang", text=words, remedy=remedy, ranks=tuple(late), weight=7.0)
        )
    return found


def _behind(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    """Finds ranks whose step count has fallen behind, as when a program skips steps on some ranks."""
    live = {rank: process for rank, process in job_snapshot.live.items() if process.step is not None}
    if job_snapshot.state is not State.RUNNING or len(live) < 2:
        return []
    steps = {rank: process.step or 0 for rank, process in live.items()}
    rates = [totals.steps / totals.seconds for totals in job_snapshot.step_totals.values() if totals.seconds]
    most = max(steps.values())
    margin = max(5.0, _BEHIND_S * max(rates, default=0.0))
    slow = tuple(rank for rank, step in steps.items() if most - step > margin)
    if not slow:
        return []
    words = f"{does(where(job_snapshot, slow), 'is', 'are')} {most - min(steps.values()):,} steps behind the others"
    remedy = "count the loop by optimizer.session.steps, and let every rank make the same calls"
    return [JobDiagnosis(level=Level.WARN, kind="behind", text=words, remedy=remedy, ranks=slow, weight=0.5)]


def _versions(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    for name in ("stormtorch", "torch"):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, process in job_snapshot.everyone.items():
            if process.versions.get(name):
                ranks_of[process.versions[name]].append(rank)
        if len(ranks_of) > 1:
            (usual, _), *others = sorted(ranks_of.items(), key=lambda each: -len(each[1]))
            ranks = tuple(rank for _, some in others for rank in some)
            words = f"{does(where(job_snapshot, ranks), 'runs', 'run')} {name} {others[0][0]}, the others {usual}"
            remedy = "install the same version everywhere"
            return [JobDiagnosis(level=Level.WARN, kind="versions", text=words, remedy=remedy, ranks=ranks, weight=0.2)]
    return []


# --- time ------------------------------------------------------------------------------------------------------------


def _slow_rank(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    breakdowns = job_snapshot.breakdowns
    if len(breakdowns) < 2:
        return []
    slowest = max(breakdowns, key=lambda rank: breakdowns[rank].compute_s)
    others = [breakdown.compute_s for rank, breakdown in breakdowns.items() if rank != slowest]
    usual = median(others)
    waits = [breakdown.straggler_s for rank, breakdown in breakdowns.items() if rank != slowest]
    waited = sum(waits) / len(waits)
    share = waited / breakdowns[slowest].step_s if breakdowns[slowest].step_s else 0.0
    if breakdowns[slowest].compute_s < _SLOWER * usual or share < _WAITED:
        return []
    factor = f"{breakdowns[slowest].compute_s / usual:.1f}x as long as" if usual > 0 else "much longer than"
    words = (
        f"{where(job_snapshot, (slowest,))} computes {factor} the others: they wait {time_text(waited)} a step for it"
    )
    remedy = "check what else runs there, its clock and temperature, its data loader, and the size of its batches"
    level = Level.BAD if share >= 2 * _WAITED else Level.WARN
    return [
        JobDiagnosis(
            level=level, kind="slow", text=words.replace(": ", ", and "), remedy=remedy, ranks=(slowest,), weight=share
        )
    ]


def _network(job_snapshot: JobSnapshot, cost: NetworkCost) -> list[JobDiagnosis]:
    if cost.network_share < _NETWORK:
        return []
    words = f"{percent(cost.network_share)} of a step is waiting for the network"
    if cost.line_share is not None:
        words += f", which is used at {percent(min(1.0, cost.line_share))} of its rate"
    remedy = "send less (wire=torch.bfloat16 or torch.int8), use larger batches, or get a faster link"
    if len({process.host for process in job_snapshot.live.values()}) == 1 and len(job_snapshot.live) > 1:
        # Shared memory is no bottleneck: processes of one machine wait for its cores.
        words = f"{percent(cost.network_share)} of a step is waiting for other ranks on the same machine"
        remedy = "they share its cores, so start fewer ranks or give each fewer threads (OMP_NUM_THREADS)"
        used = [process.cores for process in job_snapshot.live.values()]
        if None not in used and (cores := sum(each or 0.0 for each in used)) < _ONE_CORE:
            remedy = f"they use {cores:.2g} cores together, so see what else keeps this machine busy (top)"
    level = Level.BAD if cost.network_share >= _NETWORK_MOST else Level.WARN
    elements = max((process.parameters or 0 for process in job_snapshot.live.values()), default=0)
    if 0 < elements < _TINY_MODEL and cost.step_s < _SHORT_STEP_S:
        words = (
            f"A step of {elements:,} parameters takes {time_text(cost.step_s)}, {percent(cost.network_share)} of it "
            "for exchanges: that is their fixed cost, which larger models hardly notice"
        )
        remedy, level = "nothing is wrong; larger batches make fewer steps", Level.GOOD
    return [JobDiagnosis(level=level, kind="network", text=words, remedy=remedy, weight=0.5 * cost.network_share)]


# --- replicas --------------------------------------------------------------------------------------------------------


def _drift(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    over = {}
    for rank, process in job_snapshot.live.items():
        drift, bound = process.latest.get("pair_drift"), process.latest.get("pair_bound")
        if drift is not None and bound and drift > _OVER_BOUND * bound:
            over[rank] = drift / bound
    # One rank's samples are noisy; require half of the ranks.
    if not over or 2 * len(over) < len(job_snapshot.live):
        return []
    worst = max(over, key=lambda rank: over[rank])
    words = f"Replicas drift apart by {over[worst]:.1f}x the theoretical bound for this loss"
    remedy = "losses come in bursts or gradients are large: lower max_lag, or retransmit more (budget)"
    return [JobDiagnosis(level=Level.WARN, kind="drift", text=words, remedy=remedy, ranks=tuple(over), weight=0.3)]


def _guard(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    shares = {rank: totals.guarded / totals.steps for rank, totals in job_snapshot.step_totals.items()}
    if not shares or (mean := sum(shares.values()) / len(shares)) < _GUARDED:
        return []
    words = f"The guard makes {percent(mean)} of the steps exact, because too little arrives"
    remedy = "that is safe but slow: find the cause of the loss, or raise the guard's limit"
    return [JobDiagnosis(level=Level.WARN, kind="guard", text=words, remedy=remedy, weight=0.2)]


# --- all is well -----------------------------------------------------------------------------------------------------


def _well(job_snapshot: JobSnapshot, cost: NetworkCost) -> JobDiagnosis:
    everyone = job_snapshot.everyone
    steps = max((process.step + 1 for process in everyone.values() if process.step is not None), default=0)
    parts = [f"{len(job_snapshot.live)} rank{'s' * (len(everyone) > 1)}", f"{steps:,} steps"]
    if cost.step_s:
        parts.append(f"{time_text(cost.step_s)} a step")
    if cost.link_loss is not None:
        parts.append(f"{percent(cost.link_loss)} lost")
    parts.append(f"{percent(cost.network_share)} of a step waits for the network")
    words = "All is well" if job_snapshot.state is State.RUNNING else "All went well"
    if not steps:
        return JobDiagnosis(level=Level.IDLE, kind="starting", text=f"{parts[0]} present, no step complete yet")
    return JobDiagnosis(level=Level.GOOD, kind="well", text=f"{words}: {', '.join(parts)}")
