"""Options that several commands of `stormtorch bench` take."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormtorch.cli.console import check_file, names

if TYPE_CHECKING:
    from stormtorch.lab.conditions import Conditions

# Declared here, so that --help answers without importing torch; a test compares them with the real ones.
BACKENDS = "storm,storm-lossy,gloo"
LAB_BACKENDS = "storm,storm-lossy,gloo-bbr,gloo-cubic"
DDP_BACKENDS = "storm,storm-lossy,storm-drift,gloo"
LAB_DDP_BACKENDS = "storm,storm-lossy,storm-drift,gloo-bbr,gloo-cubic"
LEARNERS = "gloo,storm-drift"
LAB_LEARNERS = "gloo-bbr,storm-drift"
MANNERS = "all-to-all,incast,tcp,low,step"
WARMUP, LAB_WARMUP = 3, 1
PARAMS, LAB_PARAMS = 25.0, 10.0


class Dtype(StrEnum):
    """What can be summed."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


_LAB = "In a lab"
Hosts = Annotated[int, typer.Option(help="Ranks, each a process of this machine: 2 to 64.")]
Warmup = Annotated[int, typer.Option(help="Rounds before the timed ones; their results are checked.")]
WarmupAnywhere = Annotated[
    int | None,
    typer.Option(
        help="Rounds before the timed ones; their results are checked.",
        show_default=f"{WARMUP}; in a lab {LAB_WARMUP}",
    ),
]
Backends = Annotated[str, typer.Option(help="Which to compare, separated by commas.")]
BackendsAnywhere = Annotated[
    str | None,
    typer.Option(
        help="Which to compare, separated by commas. In a lab there are also gloo-bbr and gloo-cubic, by TCP's "
        "congestion control.",
        show_default=f"{BACKENDS}; in a lab {LAB_BACKENDS}",
    ),
]
DdpBackends = Annotated[
    str | None,
    typer.Option(
        help="Which to compare, separated by commas. In a lab there are also gloo-bbr and gloo-cubic, by TCP's "
        "congestion control.",
        show_default=f"{DDP_BACKENDS}; in a lab {LAB_DDP_BACKENDS}",
    ),
]
Wires = Annotated[
    str,
    typer.Option(help="What storm-lossy and storm-drift send: float32, bfloat16, int8; of several, each is measured."),
]
Json = Annotated[Path | None, typer.Option(help="Write conditions and results to this file.", dir_okay=False)]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the times into this .png, .svg or .pdf; needs matplotlib.", dir_okay=False)
]
Timeout = Annotated[float, typer.Option(help="Give up after so many seconds in all.")]
Rate = Annotated[str | None, typer.Option(help="Of each host's line, such as 400mbit.", rich_help_panel=_LAB)]
Loss = Annotated[
    float | None, typer.Option(help="Fraction of all packets to lose, TCP's as well: 0 to 1.", rich_help_panel=_LAB)
]
Delay = Annotated[
    str | None,
    typer.Option(help="From host to host, one way, such as 20ms: a round trip takes twice.", rich_help_panel=_LAB),
]
Jitter = Annotated[str | None, typer.Option(help="Up to so much more delay.", rich_help_panel=_LAB)]
Tcp = Annotated[str | None, typer.Option(help="Congestion control that plain gloo meets.", rich_help_panel=_LAB)]
Seed = Annotated[int, typer.Option(help="Of the loss.")]
Burst = Annotated[float | None, typer.Option(help="Mean length of a run of losses.", rich_help_panel=_LAB)]
Queue = Annotated[
    str | None,
    typer.Option(help="What may wait at each end of a line.", rich_help_panel=_LAB, show_default="512kb"),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience-s",
        "--patience",
        help="Give up a TCP call after so many seconds; who has used as many sits out the other rounds.",
        rich_help_panel=_LAB,
    ),
]


def network_of(seed: int, **conditions: str | float | None) -> "Conditions | None":
    """The lab's network; None where no condition was given: that is loopback."""
    from stormtorch.checks import BadCondition
    from stormtorch.lab.conditions import Conditions

    given = {name: value for name, value in conditions.items() if value is not None}
    if not given:
        return None
    if "burst" in given and "loss" not in given:
        raise BadCondition("burst", "needs a --loss that comes in bursts")
    return Conditions(seed=seed, **given)  # type: ignore[arg-type]  # it checks them all


def warmup_of(asked: int | None, network: "Conditions | None") -> int:
    """What was asked for, or what suits the place."""
    return asked if asked is not None else WARMUP if network is None else LAB_WARMUP


def backends_of(
    asked: str | None, network: "Conditions | None", here: str = BACKENDS, lab: str = LAB_BACKENDS
) -> tuple[str, ...]:
    """What was asked for, or what suits the place."""
    return names(asked or (here if network is None else lab))


def check_outputs(json: Path | None, plot: Path | None = None) -> None:
    """What cannot be written is noticed before anything is measured."""
    check_file("json", json)
    if plot is not None:
        from stormtorch.cli.plots.bench import check_plot

        check_plot(plot)
        check_file("plot", plot)
