"""Captions of the tables of benchmarks: rounds, loss and drops."""

from typing import Any

from stormtorch.telemetry.statistics import median
from stormtorch.telemetry.text import bursts_of, loss_text, time_text


def round_text(conditions: dict[str, Any]) -> str:
    """Describes the number of rounds, and what ">" means."""
    return (
        f"Interleaved rounds, {conditions['iters']} requested; times are the slowest rank's, > where a call did not "
        f"end within {conditions['patience_s']:g} s"
    )


def loss_sentence(requested: dict[str, Any], measured: dict[str, Any]) -> str:
    """Describes the requested and the measured loss."""
    loss = requested["loss"]
    text = "Loss of packets, the same for all backends"
    if isinstance(loss, float):
        text += f": {loss_text(loss)} requested, "
    elif "p" in loss:
        text += f": {loss_text(loss['p'])} in bursts of {bursts_of(requested)} requested, "
    else:
        text += " by a model: "
    runs = f" in runs of {measured['burst']:.3g}" if measured.get("burst", 1.0) > 1.0 else ""
    text += f"{loss_text(measured['loss'])}{runs} measured; {loss_text(measured['overflow'])} more found a queue full."
    if measured["round_trips_s"]:
        text += f" Round trip measured: {time_text(median(measured['round_trips_s']))}."
    return text


def troubles_text(conditions: dict[str, Any]) -> str:
    """Warns of datagrams that the kernel dropped and of processor time that the hypervisor withheld; "" if neither."""
    drops, withheld = conditions["kernel_drops"], conditions.get("processors_withheld")
    text = f" The kernel dropped {drops} datagrams because socket buffers were full." if drops else ""
    if much_withheld(withheld):
        text += f" The hypervisor withheld {withheld:.0%} of the processor time: times are unreliable."
    return text


def much_withheld(share: float | None) -> bool:
    """Whether the hypervisor withheld so much processor time (steal) that threads woke late."""
    return share is not None and share > 0.05
