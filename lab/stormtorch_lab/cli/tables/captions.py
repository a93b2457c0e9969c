"""Sentences below the tables of benchmarks: rounds, loss and drops."""

from typing import Any

from stormtorch.telemetry.statistics import median
from stormtorch.telemetry.text import bursts_of, loss_text, time_text


def round_text(conditions: dict[str, Any]) -> str:
    """Says how many rounds there are, and what ">" means."""
    return (
        f"Interleaved rounds, {conditions['iters']} asked for; times are the slowest rank's, > where a call did not "
        f"end within {conditions['patience_s']:g} s"
    )


def loss_sentence(requested: dict[str, Any], measured: dict[str, Any]) -> str:
    """Loss that was asked for and measured."""
    loss = requested["loss"]
    text = "Loss of packets, the same for all backends"
    if isinstance(loss, float):
        text += f": {loss_text(loss)} asked, "
    elif "p" in loss:
        text += f": {loss_text(loss['p'])} in bursts of {bursts_of(requested)} asked, "
    else:
        text += " by a model: "
    runs = f" in runs of {measured['burst']:.3g}" if measured.get("burst", 1.0) > 1.0 else ""
    text += f"{loss_text(measured['loss'])}{runs} measured; {loss_text(measured['overflow'])} more found a queue full."
    if measured["round_trips_s"]:
        text += f" Round trip measured: {time_text(median(measured['round_trips_s']))}."
    return text


def troubles_text(conditions: dict[str, Any]) -> str:
    """What went wrong on this machine, if anything: datagrams that were dropped, processors that were withheld."""
    drops, withheld = conditions["kernel_drops"], conditions.get("processors_withheld")
    text = f" The kernel dropped {drops} datagrams for want of buffer." if drops else ""
    if much_withheld(withheld):
        text += f" Others withheld {withheld:.0%} of the processor time that this machine asked for: times say little."
    return text


def much_withheld(share: float | None) -> bool:
    """Whether so much processor time was withheld from this virtual machine that threads woke late."""
    return share is not None and share > 0.05
