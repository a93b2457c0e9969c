"""The verdict: what is wrong with a job in plain sentences, each with a culprit and a remedy, the worst first."""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from stormtorch.results.text import rate_text, time_text
from stormtorch.watch.cost import Cost, cost_of
from stormtorch.watch.job import named
from stormtorch.watch.moment import LinkState, Moment, State

# A rank or link stands out if it loses at least this. Half a percent is beyond what healthy Ethernet does (below
# 0.01 %), and what Wi-Fi shows in good times; an estimate of a thousand datagrams is good to about 0.2 %.
_LOSS = 0.005
# ... and this many times what the others lose: a network that loses evenly has no culprit. Estimates of the same loss
# on different links differ by less than half.
_STANDS_OUT = 3.0
# All links together: from here on, loss costs a training about as much as it costs a batch, 1 % of the steps.
_EVEN_LOSS = 0.01
# A rank is slow if it computes for longer than the others by this factor; ranks on equal machines differ by about a
# tenth. Everybody must wait for it for at least this share of a step, or it does not matter.
_SLOWER = 1.25
_WAITED = 0.1
# Waiting for the network is worth a sentence above a quarter of a step, and is what to work on above a half.
_NETWORK, _NETWORK_MOST = 0.25, 0.5
# Rates and round trips of single links: rate control and queues make factors of two; four is another kind of line. A
# longer round trip matters only where it is felt, from some milliseconds on.
_OTHER_LINE = 4.0
_FELT_RTT_S = 0.005
# The bound holds on average; single samples go above it by some tens of percent.
_OVER_BOUND = 1.5
# Steps that the guard made exact. Some at the beginning of a training are usual.
_GUARDED = 0.2
# A wait that has lasted for so long is no part of a step any more.
_HANGS_S = 10.0
# Records come once a second and ranks move in step: whoever is behind by more than this many seconds of steps is.
_BEHIND_S = 15.0


class Level(StrEnum):
    """How much a finding matters."""

    BAD = "bad"
    WARN = "warn"
    GOOD = "good"
    IDLE = "idle"
    """There is nothing to judge yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, or that all is well."""

    level: Level
    kind: str
    text: str
    """What is wrong and whose fault it is, in one sentence without its end."""
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    """Links that it is about, each as (sender, receiver)."""
    weight: float = 0.0
    """Cost as a share of a step or of the bytes: orders findings of one level."""

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        return f"{self.text}: {self.remedy}." if self.remedy else f"{self.text}."


def judge(moment: Moment) -> list[Finding]:
    """Returns what is to be said of a job, the most important first; at least one finding."""
    if moment.state is State.EMPTY:
        words = "No rank has told anything yet"
        return [
            Finding(level=Level.IDLE, kind="empty", text=words, remedy="records begin with the first steps of a job")
        ]
    found = [*_ends(moment), *_silence(moment), *_hangs(moment), *_versions(moment)]
    found += [*_losses(moment), *_slow_rank(moment), *_lines(moment)]
    cost = cost_of(moment)
    found += [*_network(cost), *_drift(moment), *_guard(moment), *_behind(moment)]
    order = {Level.BAD: 0, Level.WARN: 1, Level.GOOD: 2, Level.IDLE: 3}
    found.sort(key=lambda each: (order[each.level], -each.weight))
    return found or [_well(moment, cost)]


def _where(moment: Moment, ranks: tuple[int, ...]) -> str:
    """Names ranks by their host where they are all the ranks of it, and by their numbers otherwise."""
    everyone = moment.everyone
    hosts = {everyone[rank].host for rank in ranks if rank in everyone}
    if len(hosts) == 1 and (host := next(iter(hosts))):
        whole = tuple(rank for rank, process in everyone.items() if process.host == host)
        if whole == ranks and len(everyone) > len(ranks):
            return f"Host {host} ({named(ranks)})"
        if len(ranks) == 1:
            return f"Rank {ranks[0]} on {host}"
    text = named(ranks)
    return text[0].upper() + text[1:]


def _percent(fraction: float) -> str:
    """A share as people say it: "12 %", "0.4 %"."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.0995 else f"{100 * fraction:.2g} %"


# --- ranks that end, die or hang -------------------------------------------------------------------------------------


def _ends(moment: Moment) -> list[Finding]:
    found = []
    for rank, process in moment.everyone.items():
        if moment.states[rank] is State.FAILED:
            step = f" at step {process.step:,}" if process.step is not None else ""
            words = f"{_where(moment, (rank,))} failed{step}: {process.why}"
            found.append(Finding(level=Level.BAD, kind="failed", text=words.rstrip("."), ranks=(rank,), weight=9.0))
    return found[:3]


def _silence(moment: Moment) -> list[Finding]:
    states = moment.states
    found = []
    gone = tuple(rank for rank, state in states.items() if state is State.GONE)
    silent = tuple(rank for rank, state in states.items() if state is State.SILENT)
    left = len(states) - len(gone) - len(silent)
    running = State.RUNNING in states.values()
    if gone:
        step = max(moment.everyone[rank].step or 0 for rank in gone)
        words = f"{_where(moment, gone)} died or was cut off after step {step:,}, and {left} of {len(states)} ranks "
        words += "train on" if running else "went on to the end"
        remedy = "start it again with the same command, and it comes back in" if running else ""
        level = Level.BAD if running else Level.WARN
        found.append(Finding(level=level, kind="gone", text=words, remedy=remedy, ranks=gone, weight=5.0))
    if silent:
        quiet = time_text(moment.now - max(moment.everyone[rank].told for rank in silent))
        if running:
            words = f"{_where(moment, silent)} has told nothing for {quiet}"
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
        words = f"{_where(moment, alone)} hears no majority of the ranks and waits"
        remedy = "start the ranks that are missing, or see why their datagrams do not arrive (stormtorch doctor)"
        found.append(Finding(level=Level.BAD, kind="quorum", text=words, remedy=remedy, ranks=alone, weight=8.0))
    waiting = {rank: process for rank, process in live.items() if process.waits_s >= _HANGS_S}
    if waiting:
        # Whoever is waited for and does not wait itself holds up the others.
        late = {peer for process in waiting.values() for peer in process.waits_for} - waiting.keys()
        longest = max(waiting.values(), key=lambda process: process.waits_s)
        where = f" in {longest.waits_in}" if longest.waits_in else ""
        words = f"{_where(moment, tuple(waiting))} has waited for {time_text(longest.waits_s)}{where}"
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
    words = f"{_where(moment, slow)} is {most - min(steps.values()):,} steps behind the others"
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
            words = f"{_where(moment, ranks)} runs {name} {others[0][0]}, the others {usual}"
            remedy = "install the same version everywhere"
            return [Finding(level=Level.WARN, kind="versions", text=words, remedy=remedy, ranks=ranks, weight=0.2)]
    return []


# --- loss ------------------------------------------------------------------------------------------------------------


def _losses(moment: Moment) -> list[Finding]:
    known = [link for link in moment.links if link.loss is not None]
    if not known:
        return []
    loss = {(link.sender, link.receiver): link.loss or 0.0 for link in known}
    usual = median(loss.values())
    found = []
    explained: set[tuple[int, int]] = set()
    groups = _groups(moment)
    ends = [(inside, receives) for inside in groups for receives in (True, False)] if len(groups) > 2 else []
    suspects = [finding for inside, receives in ends if (finding := _bad_end(moment, loss, inside, receives=receives))]
    suspects += _bad_direction(moment, loss, groups) if len(groups) == 2 else []
    # A host that loses what it receives makes all others look a little like bad senders: the worst explains most.
    for finding in sorted(suspects, key=lambda each: -each.weight):
        if not explained.issuperset(finding.links):
            found.append(finding)
            explained.update(finding.links)
    least = max(_LOSS, _STANDS_OUT * usual)
    bad = sorted((link for link in loss if loss[link] >= least and link not in explained), key=lambda each: -loss[each])
    if bad:
        found.append(_bad_link(moment, loss, bad, usual))
    rest = [value for link, value in loss.items() if link not in explained]
    if not found and rest and usual >= _EVEN_LOSS:
        cost = cost_of(moment)
        words = f"All links lose about {_percent(sum(rest) / len(rest))}, none much more than the others"
        if cost.more_steps is not None:
            words += (
                f"; that costs about {_percent(cost.more_steps)} more steps by theory"
                if cost.more_steps >= 5e-4
                else ("; repair makes up for it")
            )
        remedy = "look at what they share: a switch, a VPN, Wi-Fi, a rate above what the line carries"
        found.append(Finding(level=Level.WARN, kind="loss", text=words, remedy=remedy, weight=usual))
    return found


def _groups(moment: Moment) -> list[tuple[int, ...]]:
    """The ranks of each host, or each rank by itself where hosts are not known or there is only one."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, process in moment.live.items():
        by_host[process.host or f"rank {rank}"].append(rank)
    if len(by_host) == 1:
        return [(rank,) for ranks in by_host.values() for rank in ranks]
    return [tuple(ranks) for ranks in by_host.values()]


def _bad_end(
    moment: Moment, loss: dict[tuple[int, int], float], inside: tuple[int, ...], *, receives: bool
) -> Finding | None:
    """Finds a host that loses what it receives from everybody, or whose sendings everybody loses."""
    own = {
        link: value
        for link, value in loss.items()
        if (link[1] in inside) == receives and (link[0] in inside) != receives
    }
    others = [value for link, value in loss.items() if link[0] not in inside and link[1] not in inside]
    if len(own) < 2 or not others:
        return None
    # The least of its links must stand out, so that one bad link alone is not taken for a bad host.
    least = max(_LOSS, _STANDS_OUT * median(others))
    if min(own.values()) < least / 2 or median(own.values()) < least:
        return None
    mean = sum(own.values()) / len(own)
    where = _where(moment, inside)
    if receives:
        words = f"{where} loses {_percent(mean)} of what it receives, from every sender"
        full = sum(moment.everyone[rank].counter("overflow") for rank in inside)
        usual = "check its cable, its switch port or its receive buffer (net.core.rmem_max)"
        remedy = _overflowed(full) if full > 0 else usual
    else:
        words = f"Everybody loses {_percent(mean)} of what {where[0].lower() + where[1:]} sends"
        remedy = "check its cable, its switch port or its rate (Options(rate=...))"
    return Finding(
        level=Level.BAD, kind="receiver" if receives else "sender", text=words, remedy=remedy, ranks=inside,
        links=tuple(own), weight=mean,
    )  # fmt: skip


def _bad_direction(moment: Moment, loss: dict[tuple[int, int], float], groups: list[tuple[int, ...]]) -> list[Finding]:
    """Between two hosts, finds directions that lose; which of the two ends is to blame cannot be told from here."""
    found = []
    for sender, receiver in (groups, groups[::-1]):
        own = {link: value for link, value in loss.items() if link[0] in sender and link[1] in receiver}
        others = [value for link, value in loss.items() if link not in own]
        if not own or not others or min(own.values()) < max(_LOSS, _STANDS_OUT * median(others)):
            continue
        mean = sum(own.values()) / len(own)
        names = [_where(moment, each) for each in (sender, receiver)]
        words = (
            f"{_percent(mean)} is lost of what goes from {' to '.join(each[0].lower() + each[1:] for each in names)}"
        )
        full = sum(moment.everyone[rank].counter("overflow") for rank in receiver)
        remedy = (
            _overflowed(full) if full > 0 else "check the cable and the switch ports of both, and the receiver's buffer"
        )
        links = tuple(own)
        found.append(
            Finding(
                level=Level.BAD, kind="direction", text=words, remedy=remedy, ranks=receiver, links=links, weight=mean
            )
        )
    return found


def _overflowed(times: float) -> str:
    return f"its receive buffer overflowed {times:,.0f} times, so raise net.core.rmem_max or give it more cores"


def _bad_link(moment: Moment, loss: dict[tuple[int, int], float], bad: list[tuple[int, int]], usual: float) -> Finding:
    sender, receiver = bad[0]
    others = "the others nothing" if usual < 5e-6 else f"the others {_percent(usual)}"
    words = f"The link {sender} -> {receiver} loses {_percent(loss[bad[0]])}, {others}"
    if len(bad) == 2 and bad[1] == (receiver, sender):
        words = (
            f"The link {sender} <-> {receiver} loses {_percent(loss[bad[0]])} and {_percent(loss[bad[1]])}, {others}"
        )
    elif len(bad) > 1:
        words += f"; {len(bad) - 1} more stand{'s' * (len(bad) == 2)} out"
    ends = tuple(moment.everyone[rank].host or f"rank {rank}" for rank in (sender, receiver))
    remedy = f"check what only {ends[0]} and {ends[1]} share: a cable, a route, a firewall's limit"
    level = Level.BAD if loss[bad[0]] >= 4 * _LOSS else Level.WARN
    return Finding(level=level, kind="link", text=words, remedy=remedy, links=tuple(bad), weight=loss[bad[0]])


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
        f"{_where(moment, (slowest,))} computes {factor} the others: everyone waits {time_text(waited)} a step for it"
    )
    remedy = "check what else runs there, its clock and temperature, its data loader, and the size of its batches"
    level = Level.BAD if share >= 2 * _WAITED else Level.WARN
    return [
        Finding(
            level=level, kind="slow", text=words.replace(": ", ", and "), remedy=remedy, ranks=(slowest,), weight=share
        )
    ]


def _lines(moment: Moment) -> list[Finding]:
    """Finds links that are much slower or longer than the others."""
    links = moment.links
    found = []
    rates = [link for link in links if link.rate]
    if len(rates) >= 4:
        usual = median(link.rate or 0.0 for link in rates)
        slow = [link for link in rates if (link.rate or 0.0) * _OTHER_LINE <= usual]
        if slow and 2 * len(slow) < len(rates):
            words, ranks = _common_end(moment, slow, links)
            worst = min(link.rate or 0.0 for link in slow)
            text = f"{words} carries {rate_text(8 * worst)}, the others {rate_text(8 * usual)}"
            remedy = "check the speed that its interface agreed on (ethtool), and what else uses the line"
            pairs = tuple((link.sender, link.receiver) for link in slow)
            found.append(
                Finding(level=Level.WARN, kind="rate", text=text, remedy=remedy, ranks=ranks, links=pairs, weight=0.1)
            )
    trips = [link for link in links if link.rtt_s]
    if len(trips) >= 4:
        usual = median(link.rtt_s or 0.0 for link in trips)
        far = [link for link in trips if (link.rtt_s or 0.0) >= max(_FELT_RTT_S, _OTHER_LINE * usual)]
        if far and 2 * len(far) < len(trips):
            words, ranks = _common_end(moment, far, links)
            worst = max(link.rtt_s or 0.0 for link in far)
            text = f"{words} takes {time_text(worst)} for a round trip, the others {time_text(usual)}"
            remedy = "check its route, and whether a queue on the way is full"
            pairs = tuple((link.sender, link.receiver) for link in far)
            found.append(
                Finding(level=Level.WARN, kind="rtt", text=text, remedy=remedy, ranks=ranks, links=pairs, weight=0.05)
            )
    return found


def _common_end(moment: Moment, links: list[LinkState], everything: list[LinkState]) -> tuple[str, tuple[int, ...]]:
    """Names the rank that all these links share, or the worst of them."""
    if len(links) > 2:
        for rank in {end for link in links for end in (link.sender, link.receiver)}:
            if all(rank in (link.sender, link.receiver) for link in links):
                return f"Every link of {_where(moment, (rank,)).replace('Rank', 'rank', 1)}", (rank,)
    first = links[0]
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return f"The link {first.sender} -> {first.receiver}{more}", ()


def _network(cost: Cost) -> list[Finding]:
    if cost.network_share < _NETWORK:
        return []
    words = f"{_percent(cost.network_share)} of a step is waiting for the network"
    if cost.line_share is not None:
        words += f", which is used at {_percent(min(1.0, cost.line_share))} of its rate"
    remedy = 'send less (wire="bfloat16" or "int8"), take larger batches, or a faster line'
    level = Level.BAD if cost.network_share >= _NETWORK_MOST else Level.WARN
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
    words = f"The guard makes {_percent(mean)} of the steps exact, as too little arrives"
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
        parts.append(f"{_percent(cost.link_loss)} lost")
    parts.append(f"{_percent(cost.network_share)} of a step waits for the network")
    words = "All is well" if moment.state is State.RUNNING else "All went well"
    if not steps:
        return Finding(level=Level.IDLE, kind="starting", text=f"{parts[0]} present, no step complete yet")
    return Finding(level=Level.GOOD, kind="well", text=f"{words}: {', '.join(parts)}")
