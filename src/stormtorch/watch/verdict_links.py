"""Diagnoses of links: lossy hosts and links, slow links, long round trips."""

from collections import defaultdict
from statistics import median

from stormtorch.telemetry.text import rate_text, time_text
from stormtorch.watch.cost import network_cost
from stormtorch.watch.diagnoses import JobDiagnosis, Level, does, percent, where
from stormtorch.watch.job_snapshot import JobSnapshot, LinkState

# A rank or link stands out if it loses at least this. Healthy Ethernet and good Wi-Fi lose less (Ethernet below 0.01
# %); an estimate from a thousand datagrams is accurate to about 0.2 %.
_LOSS = 0.005
# ... and at least this many times the loss of the others: evenly distributed loss has no culprit. Estimates of the same
# loss on different links differ by less than half.
_STANDS_OUT = 3.0
# Median loss of all links from which it matters: it costs about as many steps, 1 %.
_EVEN_LOSS = 0.01
# A link is slow or long by at least this factor; rate control and queues alone cause factors of two. A round trip
# matters only from some milliseconds on.
_OUTLIER_FACTOR = 4.0
_FELT_RTT_S = 0.005


def losses(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    """Finds hosts that lose what they receive or send, then single links, then loss that all links share."""
    known = [link for link in job_snapshot.links if link.loss is not None]
    if not known:
        return []
    loss = {(link.sender, link.receiver): link.loss or 0.0 for link in known}
    usual = median(loss.values())
    found = []
    explained: set[tuple[int, int]] = set()
    groups = _groups(job_snapshot)
    ends = [(inside, receives) for inside in groups for receives in (True, False)] if len(groups) > 2 else []
    suspects = [
        diagnosis for inside, receives in ends if (diagnosis := _bad_end(job_snapshot, loss, inside, receives=receives))
    ]
    suspects += _bad_direction(job_snapshot, loss, groups) if len(groups) == 2 else []
    # A host that loses what it receives makes all others look like bad senders: start with the worst.
    for diagnosis in sorted(suspects, key=lambda each: -each.weight):
        if not explained.issuperset(diagnosis.links):
            found.append(diagnosis)
            explained.update(diagnosis.links)
    least = max(_LOSS, _STANDS_OUT * usual)
    bad = sorted(
        (link for link in loss if loss[link] >= least and link not in explained), key=lambda each: (-loss[each], each)
    )
    if bad:
        found.append(_bad_link(job_snapshot, loss, bad, usual))
    rest = [value for link, value in loss.items() if link not in explained]
    if not found and rest and usual >= _EVEN_LOSS:
        cost = network_cost(job_snapshot)
        words = f"All links lose about {percent(sum(rest) / len(rest))}, none much more than the others"
        if cost.more_steps is not None:
            price = f"; theory predicts about {percent(cost.more_steps)} more steps"
            words += price if cost.more_steps >= 5e-4 else "; retransmission makes up for it"
        remedy = "check what they share: a switch, a VPN, Wi-Fi, an uplink that is too slow"
        found.append(JobDiagnosis(level=Level.WARN, kind="loss", text=words, remedy=remedy, weight=usual))
    return found


def _groups(job_snapshot: JobSnapshot) -> list[tuple[int, ...]]:
    """The ranks of each host, or each rank alone if hosts are unknown or there is only one."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, process in job_snapshot.live.items():
        by_host[process.host or f"rank {rank}"].append(rank)
    if len(by_host) == 1:
        return [(rank,) for ranks in by_host.values() for rank in ranks]
    return [tuple(ranks) for ranks in by_host.values()]


def _bad_end(
    job_snapshot: JobSnapshot, loss: dict[tuple[int, int], float], inside: tuple[int, ...], *, receives: bool
) -> JobDiagnosis | None:
    """Diagnoses a host that loses what it receives from all others, or whose datagrams all others lose."""
    own = {
        link: value
        for link, value in loss.items()
        if (link[1] in inside) == receives and (link[0] in inside) != receives
    }
    others = [value for link, value in loss.items() if link[0] not in inside and link[1] not in inside]
    if len(own) < 2 or not others:
        return None
    # Even its best link must stand out: one bad link does not make a bad host.
    least = max(_LOSS, _STANDS_OUT * median(others))
    if min(own.values()) < least / 2 or median(own.values()) < least:
        return None
    mean = sum(own.values()) / len(own)
    who = where(job_snapshot, inside)
    if receives:
        words = f"{does(who, 'loses', 'lose')} {percent(mean)} of what it receives, from every sender"
        full = sum(job_snapshot.everyone[rank].counter("overflow") for rank in inside)
        usual = "check its cable, its switch port or its receive buffer (net.core.rmem_max)"
        remedy = _overflowed(full) if full > 0 else usual
    else:
        words = f"All receivers lose {percent(mean)} of what {who[0].lower() + who[1:]} sends"
        remedy = "check its cable, its switch port or its rate (Options(rate=...))"
    return JobDiagnosis(
        level=Level.BAD, kind="receiver" if receives else "sender", text=words, remedy=remedy, ranks=inside,
        links=tuple(own), weight=mean,
    )  # fmt: skip


def _bad_direction(
    job_snapshot: JobSnapshot, loss: dict[tuple[int, int], float], groups: list[tuple[int, ...]]
) -> list[JobDiagnosis]:
    """Between two hosts, finds lossy directions; which of the two ends is at fault cannot be determined."""
    found = []
    for sender, receiver in (groups, groups[::-1]):
        own = {link: value for link, value in loss.items() if link[0] in sender and link[1] in receiver}
        others = [value for link, value in loss.items() if link not in own]
        if not own or not others or min(own.values()) < max(_LOSS, _STANDS_OUT * median(others)):
            continue
        mean = sum(own.values()) / len(own)
        names = [where(job_snapshot, each) for each in (sender, receiver)]
        words = f"{percent(mean)} is lost on the way from {' to '.join(each[0].lower() + each[1:] for each in names)}"
        full = sum(job_snapshot.everyone[rank].counter("overflow") for rank in receiver)
        remedy = (
            _overflowed(full) if full > 0 else "check the cable and the switch ports of both, and the receiver's buffer"
        )
        links = tuple(own)
        found.append(
            JobDiagnosis(
                level=Level.BAD, kind="direction", text=words, remedy=remedy, ranks=receiver, links=links, weight=mean
            )
        )
    return found


def _overflowed(times: float) -> str:
    return f"its receive buffer overflowed {times:,.0f} times, so raise net.core.rmem_max or give it more cores"


def _bad_link(
    job_snapshot: JobSnapshot, loss: dict[tuple[int, int], float], bad: list[tuple[int, int]], usual: float
) -> JobDiagnosis:
    sender, receiver = bad[0]
    others = "the others nothing" if usual < 5e-6 else f"the others {percent(usual)}"
    words = f"The link {sender} -> {receiver} loses {percent(loss[bad[0]])}, {others}"
    if len(bad) == 2 and bad[1] == (receiver, sender):
        words = f"The link {sender} <-> {receiver} loses {percent(loss[bad[0]])} and {percent(loss[bad[1]])}, {others}"
    elif len(bad) > 1:
        words += f"; {len(bad) - 1} more stand{'s' * (len(bad) == 2)} out"
    ends = tuple(job_snapshot.everyone[rank].host or f"rank {rank}" for rank in (sender, receiver))
    remedy = f"check what only {ends[0]} and {ends[1]} share: a cable, a route, a firewall's limit"
    level = Level.BAD if loss[bad[0]] >= 4 * _LOSS else Level.WARN
    return JobDiagnosis(level=level, kind="link", text=words, remedy=remedy, links=tuple(bad), weight=loss[bad[0]])


def slow_or_long_links(job_snapshot: JobSnapshot) -> list[JobDiagnosis]:
    """Finds links that are much slower or longer than the others."""
    links = job_snapshot.links
    found = []
    rates = [link for link in links if link.rate]
    if len(rates) >= 4:
        usual = median(link.rate or 0.0 for link in rates)
        slow = [link for link in rates if (link.rate or 0.0) * _OUTLIER_FACTOR <= usual]
        if slow and 2 * len(slow) < len(rates):
            words, ranks = _common_end(job_snapshot, slow)
            worst = min(link.rate or 0.0 for link in slow)
            text = f"{words} carries {rate_text(8 * worst)}, the others {rate_text(8 * usual)}"
            remedy = "check the negotiated speed of its interface (ethtool), and other traffic"
            pairs = tuple((link.sender, link.receiver) for link in slow)
            found.append(
                JobDiagnosis(
                    level=Level.WARN, kind="rate", text=text, remedy=remedy, ranks=ranks, links=pairs, weight=0.1
                )
            )
    trips = [link for link in links if link.rtt_s]
    if len(trips) >= 4:
        usual = median(link.rtt_s or 0.0 for link in trips)
        far = [link for link in trips if (link.rtt_s or 0.0) >= max(_FELT_RTT_S, _OUTLIER_FACTOR * usual)]
        if far and 2 * len(far) < len(trips):
            words, ranks = _common_end(job_snapshot, far)
            worst = max(link.rtt_s or 0.0 for link in far)
            text = f"{words} takes {time_text(worst)} for a round trip, the others {time_text(usual)}"
            remedy = "check its route, and for a full queue on the way"
            pairs = tuple((link.sender, link.receiver) for link in far)
            found.append(
                JobDiagnosis(
                    level=Level.WARN, kind="rtt", text=text, remedy=remedy, ranks=ranks, links=pairs, weight=0.05
                )
            )
    return found


def _common_end(job_snapshot: JobSnapshot, links: list[LinkState]) -> tuple[str, tuple[int, ...]]:
    """Names the rank that all these links share, or the worst link."""
    if len(links) > 2:
        for rank in {end for link in links for end in (link.sender, link.receiver)}:
            if all(rank in (link.sender, link.receiver) for link in links):
                who = where(job_snapshot, (rank,))
                return f"Every link of {who[0].lower()}{who[1:]}", (rank,)
    first = links[0]
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return f"The link {first.sender} -> {first.receiver}{more}", ()
