"""Status of a rank as a few lines of text, for people and for `grep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stormtorch.telemetry.records import Record
from stormtorch.telemetry.text import loss_text, rate_text, share_text, time_text

# A peer silent for longer than this is worth a line: heartbeats arrive several times a second.
_SILENT_S = 2.0


def status_text(latest: Mapping[str, Record], now: float) -> str:
    """Formats a rank's status.

    Args:
        latest: The latest record of each kind.
        now: Seconds since 1970.
    """
    own, steps, links = latest.get("rank"), latest.get("steps"), latest.get("links")
    lines = []
    if own is not None:
        again = f", incarnation {own['incarnation']}" if own["incarnation"] else ""
        who = f"rank {own['rank']} of {own['world']}{again}, job {own['job']}"
        lines.append(f"{who}, pid {own['pid']} on {own['host']}, {own['policy']}")
    if steps is None:
        lines.append("step 0, no step is complete yet")
    else:
        speed = steps["steps"] / steps["seconds"] if steps["seconds"] > 0 else 0.0
        lines.append(
            f"step {steps['step']}, {speed:.3g} steps/s, the last {time_text(max(now - steps['time'], 0.0))} ago, "
            f"{share_text(steps['arrived'])} of the chunks arrived"
        )
    if (view := latest.get("view")) is not None:
        lines.append(f"view {view['number']} since step {view['step']}, members {_ranks(view['members'])}")
    if links is not None:
        lines += _of_links(links)
    if (end := latest.get("end")) is not None:
        lines.append(f"ended: {end['why']}")
    return "\n".join(lines) + "\n"


def _of_links(links: Record) -> list[str]:
    lines = []
    worst = worst_link(links)
    if worst is not None:
        peer, link = worst
        rate = f", sends {rate_text(8 * link['rate'])}" if link["rate"] else ""
        lost, trip = loss_text(link["loss"]), time_text(link["rtt_s"])
        lines.append(f"worst link: with rank {peer}, loses {lost}, round trip {trip}{rate}")
    silent = {peer: link["heard_s"] for peer, link in links["links"].items() if link.get("heard_s", 0.0) > _SILENT_S}
    lines += [f"silent: rank {peer} for {seconds:.1f} s" for peer, seconds in silent.items()]
    if not links["quorum"]:
        lines.append("reaches no majority of the ranks, and waits for one")
    waits = links["waits"]
    if waits is None:
        lines.append("waits for no rank")
    else:
        lines.append(f"waits: {waits['seconds']:.1f} s in {waits['call']}, with rank {_ranks(waits['peers'])}")
    return lines


def worst_link(links: Record) -> tuple[str, Record] | None:
    """Returns the link that loses most or, where none loses one in 200, the one with the longest round trip."""
    found: dict[str, Record] = links["links"]
    if not found:
        return None
    return max(found.items(), key=lambda item: (item[1]["loss"] if item[1]["loss"] > 0.005 else 0.0, item[1]["rtt_s"]))


def _ranks(ranks: Sequence[int]) -> str:
    """Abbreviates a list of ranks: "0-3, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, each)) for each in spans)
