"""The verdict: what is wrong with a job in plain sentences, each with a culprit and a remedy, the worst first."""

from collections import defaultdict
from statistics import median

from stormtorch.telemetry.text import time_text
from stormtorch.watch.cost import Cost, cost_of
from stormtorch.watch.diagnoses import Finding, Level, does, percent, where
from stormtorch.watch.job import named
from stormtorch.watch.job_snapshot import Moment, State
from stormtorch.watch.verdict_links import lines, losses

# A rank is slow if it computes for longer than the others by this factor; ranks on equal machines differ by about a
# tenth. Everybody must wait for it for at least this share of a step, or it does not matter.
_SLOWER = 1.25
_WAITED = 0.1
# Waiting for the network is worth a sentence above a quarter of a step, and is what to work on above a half.
_NETWORK, _NETWORK_MOST = 0.25, 0.5
# The bound holds on average; single samples go above it by some tens of percent.
_OVER_BOUND = 1.5
# A step has several exchanges, each of which takes its milliseconds however little it carries.
_TINY_MODEL, _SHORT_STEP_S = 200_000, 0.03
# Ranks that use less than that, all together, do not wait for each other's cores.
_ONE_CORE = 0.8
# Steps that the guard made exact. Some at the beginning of a training are usual.
_GUARDED = 0.2
# A wait that has lasted for so long is no part of a step any more.
_HANGS_S = 10.0
# Records come once a second and ranks move in step: whoever is behind by more than this many seconds of steps is.
_BEHIND_S = 15.0


def judge(moment: Moment) -> list[Finding]:
    """Returns what is to be said of a job, the most important first; at least one finding."""
    if moment.state is State.EMPTY:
        words = "No rank has told anything yet"
        return [
            Finding(level=Level.IDLE, kind="empty", text=words, remedy="records begin with the first steps of a job")
        ]
    found = [*_ends(moment), *_silence(moment), *_hangs(moment), *_versions(moment)]
    found += [*losses(moment), *_slow_rank(moment), *lines(moment)]
    cost = cost_of(moment)
    found += [*_network(moment, cost), *_drift(moment), *_guard(moment), *_behind(moment)]
    order = {Level.BAD: 0, Level.WARN: 1, Level.GOOD: 2, Level.IDLE: 3}
    found.sort(key=lambda each: (order[each.level], -each.weight))
    return found or [_well(moment, cost)]


# --- ranks that end, die or hang -------------------------------------------------------------------------------------


def _ends(moment: Moment) -> list[Finding]:
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, process in moment.everyone.items():
        if moment.states[rank] is State.FAILED:
            step = f" at step {process.step:,}" if process.step is not None else ""
            # Errors begin with the rank that raised them, which is named already.
            alike[f"failed{step}: {(process.why or '').replace(f'rank {rank}: ', '', 1)}"].append(rank)
    return [
        Finding(
            level=Level.BAD,
            kind="failed",
            text=f"{where(moment, tuple(ranks))} {words.rstrip('.')}",
            ranks=tuple(ranks),
            weight=9.0,
        )
        for words, ranks in list(alike.items())[:3]
    ]


def _silence(moment: Moment) -> list[Finding]:
    states = moment.states
    found = []
    gone = tuple(rank for rank, state in states.items() if state is State.GONE)
    silent = tuple(rank for rank, state in states.items() if state is State.SILENT)
    left = len(states) - len(gone) - len(silent)
    running = State.RUNNING in states.values()
    if gone:
        step = max(moment.everyone[rank].step or 0 for rank in gone)
        words = f"{does(where(moment, gone), 'died or was', 'died or were')} cut off after step {step:,}"
        failed = State.FAILED in states.values()
        if left:
            after = "train on" if running else "went on to an error" if failed else "went on to the end"
            words += f", and {left} of {len(states)} ranks {after}"
        remedy = "start it again with the same command, and it comes back in" if running else ""
        level = Level.BAD if running or failed else Level.WARN
        # A death comes before the errors that follow from it.
        weight = 9.5 if failed else 5.0
        found.append(Finding(level=level, kind="gone", text=words, remedy=remedy, ranks=gone, weight=weight))
    if silent:
        quiet = time_text(moment.now - max(moment.everyone[rank].arrived for rank in silent))
        if running:
            words = f"{does(where(moment, silent), 'has', 'have')} told nothing for {quiet}"
            remedy = "see whether the process still runs, and whether its folder or its port can be reached from here"
        else:
            step = max(moment.everyone[rank].step or 0 for rank in silent)
            words = f"Nobody has told anything for {quiet}, and no rank said that it ended; the last step was {step:,}"
            remedy = "it was killed, or hangs: look at its output, or attach py-spy to one of its processes"
        found.append(Finding(level=Level.BAD, kind="silent", text=words, remedy=remedy, ranks=silent, weight=6.0))
    return found


def _hangs(moment: Moment) -> list[Finding]:
    if moment.state is not State.RUNNING:
        return []
    found = []
    live = moment.live
    alone = tuple(rank for rank, process in live.items() if not process.quorum)
    if alone:
        words = f"{does(where(moment, alone), 'hears', 'hear')} no majority of the ranks, and training waits"
        remedy = "start the ranks that are missing, or see why their datagrams do not arrive (stormtorch doctor)"
        found.append(Finding(level=Level.BAD, kind="quorum", text=words, remedy=remedy, ranks=alone, weight=8.0))
    waiting = {rank: process for rank, process in live.items() if process.waits_s >= _HANGS_S}
    if waiting:
        # Whoever is waited for and does not wait itself holds up the others.
        late = {peer for process in waiting.values() for peer in process.waits_for} - waiting.keys()
        longest = max(waiting.values(), key=lambda process: process.waits_s)
        call = f" in {longest.waits_in}" if longest.waits_in else ""
        words = f"{does(where(moment, tuple(waiting)), 'has', 'have')} waited for {time_text(longest.waits_s)}{call}"
        if late and len(late) < len(live):
            words += f" for {named(tuple(late))}"
        remedy = (
            "see what that rank does (py-spy dump)"
            if late
            else "the ranks wait for each other: do all make the same calls?"
        )
        found.append(Finding(level=Level.BAD, kind="hang", text=words, remedy=remedy, ranks=tuple(late), weight=7.0))
    return found


def _behind(moment: Moment) -> list[Finding]:
    """Finds ranks whose count of steps has fallen behind, as a program that skips steps on some ranks does."""
    live = {rank: process for rank, process in moment.live.items() if process.step is not None}
    if moment.state is not State.RUNNING or len(live) < 2:
        return []
    steps = {rank: process.step or 0 for rank, process in live.items()}
    rates = [spell.steps / spell.seconds for spell in moment.spells.values() if spell.seconds]
    most = max(steps.values())
    margin = max(5.0, _BEHIND_S * max(rates, default=0.0))
    slow = tuple(rank for rank, step in steps.items() if most - step > margin)
    if not slow:
        return []
    words = f"{does(where(moment, slow), 'is', 'are')} {most - min(steps.values()):,} steps behind the others"
    remedy = "count the loop by optimizer.session.steps, and let every rank make the same calls"
    return [Finding(level=Level.WARN, kind="behind", text=words, remedy=remedy, ranks=slow, weight=0.5)]


def _versions(moment: Moment) -> list[Finding]:
    for name in ("stormtorch", "torch"):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, process in moment.everyone.items():
            if process.versions.get(name):
                ranks_of[process.versions[name]].append(rank)
        if len(ranks_of) > 1:
            (usual, _), *others = sorted(ranks_of.items(), key=lambda each: -len(each[1]))
            ranks = tuple(rank for _, some in others for rank in some)
            words = f"{does(where(moment, ranks), 'runs', 'run')} {name} {others[0][0]}, the others {usual}"
            remedy = "install the same version everywhere"
            return [Finding(level=Level.WARN, kind="versions", text=words, remedy=remedy, ranks=ranks, weight=0.2)]
    return []


# --- time ------------------------------------------------------------------------------------------------------------


def _slow_rank(moment: Moment) -> list[Finding]:
    splits = moment.splits
    if len(splits) < 2:
        return []
    slowest = max(splits, key=lambda rank: splits[rank].compute_s)
    others = [split.compute_s for rank, split in splits.items() if rank != slowest]
    usual = median(others)
    waits = [split.straggler_s for rank, split in splits.items() if rank != slowest]
    waited = sum(waits) / len(waits)
    share = waited / splits[slowest].step_s if splits[slowest].step_s else 0.0
    if splits[slowest].compute_s < _SLOWER * usual or share < _WAITED:
        return []
    factor = f"{splits[slowest].compute_s / usual:.1f}x as long as" if usual > 0 else "much longer than"
    words = (
        f"{where(moment, (slowest,))} computes {factor} the others: everyone waits {time_text(waited)} a step for it"
    )
    remedy = "check what else runs there, its clock and temperature, its data loader, and the size of its batches"
    level = Level.BAD if share >= 2 * _WAITED else Level.WARN
    return [
        Finding(
            level=level, kind="slow", text=words.replace(": ", ", and "), remedy=remedy, ranks=(slowest,), weight=share
        )
    ]


def _network(moment: Moment, cost: Cost) -> list[Finding]:
    if cost.network_share < _NETWORK:
        return []
    words = f"{percent(cost.network_share)} of a step is waiting for the network"
    if cost.line_share is not None:
        words += f", which is used at {percent(min(1.0, cost.line_share))} of its rate"
    remedy = "send less (wire=torch.bfloat16 or torch.int8), take larger batches, or a faster line"
    if len({process.host for process in moment.live.values()}) == 1 and len(moment.live) > 1:
        # No line is slower than memory: processes of one machine wait for its cores.
        words = f"{percent(cost.network_share)} of a step is waiting for other ranks on the same machine"
        remedy = "they share its cores, so start fewer ranks or give each fewer threads (OMP_NUM_THREADS)"
        used = [process.cores for process in moment.live.values()]
        if None not in used and (cores := sum(each or 0.0 for each in used)) < _ONE_CORE:
            remedy = f"they use {cores:.2g} cores together, so see what else keeps this machine busy (top)"
    level = Level.BAD if cost.network_share >= _NETWORK_MOST else Level.WARN
    elements = max((process.parameters or 0 for process in moment.live.values()), default=0)
    if 0 < elements < _TINY_MODEL and cost.step_s < _SHORT_STEP_S:
        words = (
            f"A step of {elements:,} parameters takes {time_text(cost.step_s)}, {percent(cost.network_share)} of it "
            "for exchanges: that is their fixed cost, which larger models hardly notice"
        )
        remedy, level = "nothing is wrong; larger batches make fewer steps", Level.GOOD
    return [Finding(level=level, kind="network", text=words, remedy=remedy, weight=0.5 * cost.network_share)]


# --- replicas --------------------------------------------------------------------------------------------------------


def _drift(moment: Moment) -> list[Finding]:
    over = {}
    for rank, process in moment.live.items():
        drift, bound = process.latest.get("pair_drift"), process.latest.get("pair_bound")
        if drift is not None and bound and drift > _OVER_BOUND * bound:
            over[rank] = drift / bound
    # One rank's samples are noise; half of the ranks agree only if it is so.
    if not over or 2 * len(over) < len(moment.live):
        return []
    worst = max(over, key=lambda rank: over[rank])
    words = f"Replicas drift apart by {over[worst]:.1f}x the bound that theory gives for this loss"
    remedy = "losses come in bursts or gradients are large: lower max_lag, or repair more (budget)"
    return [Finding(level=Level.WARN, kind="drift", text=words, remedy=remedy, ranks=tuple(over), weight=0.3)]


def _guard(moment: Moment) -> list[Finding]:
    shares = {rank: spell.guarded / spell.steps for rank, spell in moment.spells.items()}
    if not shares or (mean := sum(shares.values()) / len(shares)) < _GUARDED:
        return []
    words = f"The guard makes {percent(mean)} of the steps exact, as too little arrives"
    remedy = "that is safe but slow: find what loses so much, or raise the guard's limit on purpose"
    return [Finding(level=Level.WARN, kind="guard", text=words, remedy=remedy, weight=0.2)]


# --- all is well -----------------------------------------------------------------------------------------------------


def _well(moment: Moment, cost: Cost) -> Finding:
    everyone = moment.everyone
    steps = max((process.step + 1 for process in everyone.values() if process.step is not None), default=0)
    parts = [f"{len(moment.live)} rank{'s' * (len(everyone) > 1)}", f"{steps:,} steps"]
    if cost.step_s:
        parts.append(f"{time_text(cost.step_s)} a step")
    if cost.link_loss is not None:
        parts.append(f"{percent(cost.link_loss)} lost")
    parts.append(f"{percent(cost.network_share)} of a step waits for the network")
    words = "All is well" if moment.state is State.RUNNING else "All went well"
    if not steps:
        return Finding(level=Level.IDLE, kind="starting", text=f"{parts[0]} present, no step complete yet")
    return Finding(level=Level.GOOD, kind="well", text=f"{words}: {', '.join(parts)}")
