"""Requested and measured conditions of a lab, as text for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from stormtorch.cli.terminal.screen import new_table
from stormtorch.telemetry.text import bursts_of
from stormtorch_lab.netns.measured import LinkCount, Measured

if TYPE_CHECKING:
    from stormtorch_lab.netns.lab import Lab

# With more hosts, a table of all links is longer than a screen.
_MOST_LISTED_HOSTS = 8


def before_text(lab: "Lab") -> str:
    """Text shown before a command runs: requested and measured network."""
    measured = lab.measured()
    how = f"as {lab.access.name}" if not lab.access.user_namespace else f"in a {lab.access.name}"
    lines = [
        f"[bold]lab {lab.name}[/bold]: {lab.size} hosts, made {how} of {lab.kind}",
        f"  asked     {requested_text(lab.conditions.to_json())}",
    ]
    if found := _probed_text(measured.rates_bits, measured.round_trips_s):
        lines.append(f"  measured  {found}")
    return "\n".join(lines)


def show_after(measured: Measured, statuses: Sequence[int], console: Console) -> None:
    """Prints the loss measured while a command ran, and the ranks that failed."""
    line = f"[bold]measured[/bold]  {counted_text(measured.links)}; {measured.overflow:.2%} met a full queue"
    if measured.low_loss is not None:
        line += f", {measured.low_loss:.2%} of those of low priority"
    console.print(line, soft_wrap=True)
    hosts = 1 + max((link.source for link in measured.links), default=0)
    if hosts <= _MOST_LISTED_HOSTS and any(link.lost for link in measured.links):
        console.print(_matrix(measured.links, hosts))
    failed = [f"rank {rank}: {status}" for rank, status in enumerate(statuses) if status]
    if failed:
        line = f"[bold red]failed[/bold red]    {', '.join(failed)} (exit status; above 128: a signal)"
        console.print(line, soft_wrap=True)


def shown_text(reply: dict[str, Any]) -> str:
    """Text for the reply of a running lab."""
    measured = reply["measured"]
    links = [LinkCount(**link) for link in measured["links"]]
    lines = [
        f"lab {reply['lab']}: {reply['hosts']} hosts, {reply['kind']}",
        f"  asked     {requested_text(reply['requested'])}",
        f"  measured  {counted_text(links)}; {measured['overflow']:.2%} met a full queue",
    ]
    if found := _probed_text(measured["rates_bits_per_s"], measured["round_trips_s"]):
        lines.append(f"            {found} before it began")
    return "\n".join(lines)


def requested_text(requested: dict[str, Any]) -> str:
    """Describes the requested conditions in one line."""
    if (cable_mtu := requested.get("cable_mtu")) is not None:
        tcp = f", TCP {requested['tcp']}" if requested["tcp"] else ""
        return f"a cable with an MTU of {cable_mtu}, no limits{tcp}"
    rate = requested["rate_bits_per_s"]
    words = [rate_text(rate) if rate else "no rate limit", _loss_text(requested["loss"])]
    if requested["delay_s"]:
        words.append(f"{1e3 * requested['round_trip_s']:g} ms round trip")
    if requested["jitter_s"]:
        words.append(f"{1e3 * requested['jitter_s']:g} ms jitter")
    words.append(f"queues of {requested['queue_bytes'] / 1024:g} KB")
    if (share := requested.get("low_share")) is not None:
        words.append(f"low priority {share:.0%} of a link, queues of {requested['low_queue_bytes'] / 1024:g} KB")
    if requested["tcp"]:
        words.append(f"TCP {requested['tcp']}")
    if requested.get("delays_s"):
        words.append(f"{len(requested['delays_s'])} links with their own delays")
    if requested.get("lines"):
        words.append(f"{len(requested['lines'])} hosts with their own access links")
    if requested.get("cut"):
        words.append(f"cut off: {', '.join(f'h{host}' for host in requested['cut'])}")
    if requested.get("cut_links"):
        words.append(f"links cut: {', '.join(requested['cut_links'])}")
    if requested.get("nat"):
        words.append(f"behind routers: {', '.join(f'h{host} ({kind})' for host, kind in requested['nat'].items())}")
    if requested.get("mtu"):
        words.append(f"MTU {requested['mtu']}")
    return ", ".join(words)


def rate_text(bits: float) -> str:
    """Rate with a unit: "400 Mbit/s"."""
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= scale:
            return f"{bits / scale:.4g} {unit}"
    return f"{bits:.0f} bit/s"


def counted_text(links: Sequence[LinkCount]) -> str:
    """Describes how much was lost."""
    seen = sum(link.seen for link in links)
    if not seen:
        return "no packets"
    lost = sum(link.lost for link in links)
    # A share of a few packets is meaningless.
    shares = sorted(link.lost / link.seen for link in links if link.seen >= 1000)
    text = f"{lost / seen:.2%} of {seen:,} packets lost on purpose"
    if lost and len(shares) > 1:
        text += f" ({shares[0]:.2%} to {shares[-1]:.2%} per link)"
    return text


def _loss_text(loss: Any) -> str:
    if isinstance(loss, dict):
        if "links" in loss:
            return f"{_loss_text(loss['default'])} ({len(loss['links'])} links with their own loss)"
        if "trace" in loss:
            share = loss["trace"].count("1") / len(loss["trace"])
            return f"{share:.2%} loss by a trace of {len(loss['trace'])} packets"
        return f"{100 * loss['p']:g} % loss in bursts of {bursts_of({'loss': loss})}"
    return f"{100 * loss:g} % loss" if loss else "no loss"


def _probed_text(rates_bits: Sequence[float], round_trips_s: Sequence[float]) -> str:
    words = []
    if rates_bits:
        low, high = rate_text(min(rates_bits)), rate_text(max(rates_bits))
        words.append(low if low == high else f"{low} to {high}")
    if round_trips_s:
        low, high = (f"{1e3 * seconds:.3g}" for seconds in (min(round_trips_s), max(round_trips_s)))
        words.append(f"round trip {low} ms" if low == high else f"round trip {low} to {high} ms")
    return ", ".join(words)


def _matrix(links: Sequence[LinkCount], hosts: int) -> Table:
    """Loss by link: from each row to each column."""
    shares = {(link.source, link.target): link.lost / link.seen for link in links if link.seen}
    table = new_table("", lines=False)
    table.add_column("from\\to", no_wrap=True)
    for target in range(hosts):
        table.add_column(f"h{target}", justify="right", no_wrap=True)
    for source in range(hosts):
        cells = [
            f"{100 * shares[source, target]:.2f}%" if (source, target) in shares else "-" for target in range(hosts)
        ]
        table.add_row(f"h{source}", *cells)
    return table
