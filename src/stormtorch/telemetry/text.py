"""Formatting of numbers with their units."""

from typing import Any


def time_text(seconds: float) -> str:
    """Time with three digits and a unit: "850 µs", "91.3 ms", "1.24 s"."""
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if round(seconds * scale, 1) < 1000:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def signed_time_text(seconds: float) -> str:
    """Difference of two times, which noise may make negative: "-12.0 ms"."""
    return ("-" if seconds < 0 else "") + time_text(abs(seconds))


def ratio_text(value: float) -> str:
    """Ratio with three digits or more: "0.97", "12.3"."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def share_text(fraction: float) -> str:
    """Fraction in percent; 100 % only if nothing is missing."""
    return "100 %" if fraction == 1.0 else f"{min(fraction * 100, 99.99):.2f} %"


def loss_text(fraction: float) -> str:
    """Loss in percent: "0.0 %", "0.05 %", "10.0 %"."""
    return f"{fraction * 100:.1f} %" if fraction >= 0.01 or fraction == 0.0 else f"{fraction * 100:.2g} %"


def size_text(size_bytes: int) -> str:
    """Size in decimal units: "4 KB", "25 MB"."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes} B"


def rate_text(bits_per_s: float) -> str:
    """Rate in decimal units: "400 Mbit/s"."""
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_s >= scale:
            return f"{bits_per_s / scale:.3g} {unit}"
    return f"{bits_per_s:.3g} bit/s"


def network_text(requested: dict[str, Any]) -> str:
    """Conditions of a lab from its JSON, without the loss: "400 Mbit/s, round trip 40 ms"."""
    rate = requested["rate_bits_per_s"]
    text = "lab without limits" if rate is None else rate_text(rate)
    if (mtu := requested.get("cable_mtu")) is not None:
        text = f"cable with an MTU of {mtu}"
    if requested["round_trip_s"]:
        text += f", round trip {1e3 * requested['round_trip_s']:.3g} ms"
    if (share := requested.get("low_share")) is not None:
        text += f", low priority {100 * share:g} %"
    return text


def condition_text(requested: dict[str, Any]) -> str:
    """Conditions of a lab with the loss: "400 Mbit/s, round trip 40 ms, loss 10 % in bursts of 5 ms"."""
    bursts = bursts_of(requested)
    text = f"{network_text(requested)}, loss {loss_of(requested) * 100:g} %"
    return f"{text} in bursts of {bursts}" if bursts else text


def loss_of(requested: dict[str, Any]) -> float:
    """Loss rate of a lab with one loss for all links, in bursts or independent."""
    loss = requested["loss"]
    return float(loss["p"] if isinstance(loss, dict) else loss)


def bursts_of(requested: dict[str, Any]) -> str:
    """Mean burst length of that loss, in packets or in time: "20", "5 ms"; empty for independent loss."""
    loss = requested["loss"]
    if not isinstance(loss, dict):
        return ""
    return time_text(loss["burst_s"]) if "burst_s" in loss else f"{loss['burst']:g}"


def oversubscription_text(ranks: int, cores: int) -> str:
    """Warning if there are more ranks than cores."""
    return f" {ranks} ranks share {cores} cores: all times include waiting for a core." if ranks > cores else ""


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
