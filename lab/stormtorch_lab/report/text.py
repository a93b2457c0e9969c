"""Text shared by several pages: networks, machines, lists, ratios."""

from typing import Any

from stormtorch.telemetry.text import bursts_of, loss_of, network_text

_NAMES = {
    "gloo": "DDP on gloo",
    "gloo-bbr": "DDP on gloo (TCP-BBR)",
    "gloo-cubic": "DDP on gloo (TCP-CUBIC)",
    "gloo-reno": "DDP on gloo (TCP-Reno)",
    "storm": "DDP on storm",
    "storm-lossy": "DDP on storm, lossy",
    "storm-drift": "stormtorch",
    "storm-drift-bf16": "stormtorch, bfloat16",
    "storm-drift-fp16": "stormtorch, float16",
    "storm-drift-int8": "stormtorch, int8",
    "storm-drift-int4": "stormtorch, int4",
}


def called(backend: str) -> str:
    """Display name of a training backend."""
    return _NAMES.get(backend, backend)


def ranks_of(conditions: dict[str, Any]) -> int:
    """Number of ranks; earlier files call them hosts."""
    return int(conditions.get("ranks") or conditions.get("hosts") or 0)


def where_text(conditions: dict[str, Any]) -> str:
    """Network of a measurement: "100 Mbit/s, round trip 20 ms, 10 % loss"."""
    requested = conditions.get("requested")
    if isinstance(requested, dict):
        return f"{network_text(requested)}, {requested_loss_text(conditions)}"
    faults = conditions.get("faults") or conditions.get("faults_requested") or 0.0
    return "loopback" + (f", {percent(faults)} of stormtorch's datagrams lost, none of gloo's" if faults else "")


def requested_loss_text(conditions: dict[str, Any]) -> str:
    """Requested loss: "10 % loss", "10 % loss in bursts of 5 ms"."""
    requested = conditions.get("requested")
    if not isinstance(requested, dict):
        return f"{percent(conditions.get('faults') or 0.0)} loss"
    loss = requested.get("loss")
    if isinstance(loss, dict) and "p" not in loss:
        return "loss by link"
    bursts = bursts_of(requested)
    return f"{percent(loss_of(requested))} loss" + (f" in bursts of {bursts}" if bursts else "")


def percent(fraction: float) -> str:
    """Fraction in percent, short: "10 %", "0.5 %"."""
    return f"{100 * fraction:.3g} %"


def times(ratio: float) -> str:
    """Ratio: "4.4x", "61x"."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def seconds(value: float) -> str:
    """Seconds in a sentence: "0.8 s", "14 s", "2 min 5 s"."""
    if value < 0.0995:
        return f"{1000 * value:.3g} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 119.5:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def listed(words: list[str]) -> str:
    """Words with commas and an "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def machine_rows(conditions: dict[str, Any]) -> list[tuple[str, str]]:
    """Machine, versions, commit and date, if recorded."""
    machine, versions = conditions.get("machine") or {}, conditions.get("versions") or {}
    rows = [
        ("machine", f"{machine.get('cpu')}, {machine.get('cores_usable')} cores, Linux {machine.get('kernel')}")
        if machine
        else ("machine", ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", str(conditions.get("commit") or "")),
        ("date", str(conditions.get("date") or "")),
    ]
    return [row for row in rows if row[1]]
