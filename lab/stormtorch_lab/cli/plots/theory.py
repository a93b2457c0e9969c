"""Plot of what theory predicts for a loss: six panels, each with the requested loss and number of ranks marked."""

from pathlib import Path
from typing import TYPE_CHECKING

from stormtorch import theory
from stormtorch.theory import Prediction
from stormtorch_lab.cli.plots.labels import label_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _RED, _GREY, _VIOLET = "#1c7ed6", "#f59f00", "#d9480f", "#868e96", "#5f3dc4"
_MARK = "#ced4da"
_LINE, _DASHED, _DOTTED = "-", (0, (5, 2)), (0, (1, 1.6))
_MOST_LOSS = 0.5


def plot_prediction(found: Prediction, path: Path) -> None:
    """Draws drift, lag, lead, variance, mixing and rate into `path`; its ending is the format."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(16, 8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    panels = figure.subplots(2, 3)
    _drift(panels[0, 0], found)
    _lags(panels[0, 1], found)
    _lead(panels[0, 2], found)
    _variance(panels[1, 0], found)
    _mixing(panels[1, 1], found)
    _rate(panels[1, 2], found)
    for axis in panels.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e9ecef", linewidth=0.7)
        axis.set_axisbelow(True)
        if axis.patches:  # bars have no ends to label
            axis.legend(fontsize=9, framealpha=1.0, edgecolor="none")  # opaque: the marks lie behind it
        else:
            label_ends(axis)
    bound = "" if found.max_lag is None else f", no copy older than {found.max_lag} steps"
    figure.suptitle(f"What theory predicts for {found.n} ranks at {100 * found.p:g} % loss{bound}", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _losses(found: Prediction) -> list[float]:
    most = max(_MOST_LOSS, min(found.p + 0.05, 0.95))
    return [most * each / 100 for each in range(101)]


def _over_loss(axis: "Axes", found: Prediction, marks: list[tuple[float, str]]) -> None:
    """Sets the axis of losses in percent, and marks the requested loss on the curves."""
    axis.axvline(100 * found.p, color=_MARK, linewidth=1.0, zorder=1)
    for value, colour in marks:
        axis.plot([100 * found.p], [value], "o", color=colour, markersize=5)
    axis.set_xlim(0, 100 * _losses(found)[-1])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("loss, %")


def _drift(axis: "Axes", found: Prediction) -> None:
    losses = _losses(found)
    percent = [100 * p for p in losses]
    axis.plot(percent, [theory.pair_drift(p) for p in losses], color=_BLUE, label="two replicas,\nexact")
    axis.plot(
        percent,
        [theory.pair_drift_published(p) for p in losses],
        color=_ORANGE,
        linestyle=_DASHED,
        label="two replicas,\nas published",
    )
    axis.plot(
        percent, [theory.owner_drift(p) for p in losses], color=_VIOLET, linestyle=_DOTTED, label="owner and\nreplica"
    )
    marks = [(theory.pair_drift(found.p), _BLUE), (theory.owner_drift(found.p), _VIOLET)]
    if found.max_lag is not None:
        axis.plot(
            percent,
            [theory.pair_drift(p, max_lag=found.max_lag) for p in losses],
            color=_RED,
            label=f"two replicas,\nlag at most {found.max_lag}",
        )
        marks.append((found.pair_drift, _RED))
    _over_loss(axis, found, [*marks, (found.pair_drift_published, _ORANGE)])
    axis.set(title="Drift of independent updates", ylabel="mean squared difference,\nvariances of one update")


def _lags(axis: "Axes", found: Prediction) -> None:
    lags = range(max(6, 1 + (found.max_lag or 0)))
    while theory.lag_probability(lags[-1], found.p) > 1e-6 and len(lags) < 24:
        lags = range(len(lags) + 1)
    free = [100 * theory.lag_probability(lag, found.p) for lag in lags]
    axis.bar(lags, free, width=0.8, color=_BLUE, alpha=0.35, label="no bound")
    if found.max_lag is not None:
        bounded = [100 * theory.lag_probability(lag, found.p, found.max_lag) for lag in lags]
        axis.bar(lags, bounded, width=0.4, color=_RED, label=f"at most {found.max_lag}, then fetched")
    axis.axvline(found.mean_lag, color=_GREY, linestyle=_DASHED, label=f"mean, {found.mean_lag:.2f} steps")
    axis.set_yscale("log")
    axis.set_ylim(max(min((each for each in free if each), default=1.0) / 3, 1e-5), 300)
    axis.set_xticks([lag for lag in lags if len(lags) <= 12 or lag % 2 == 0])
    axis.set(title="Age of a replica's copies", xlabel="lag, steps", ylabel="copies, %")


def _lead(axis: "Axes", found: Prediction) -> None:
    losses = _losses(found)
    percent = [100 * p for p in losses]
    axis.plot(percent, [theory.lead(p) for p in losses], color=_RED, label="no bound\non the lag")
    marks = [(theory.lead(found.p), _RED)]
    for most, style in ((1, _DOTTED), (found.max_lag or 4, _DASHED)):
        if most == 1 and found.max_lag == 1:
            continue
        curve = [theory.lead(p, most) for p in losses]
        axis.plot(percent, curve, color=_GREY, linestyle=style, label=f"lag at most {most}")
    if found.max_lag is not None:
        marks.append((found.lead, _GREY))
    _over_loss(axis, found, marks)
    axis.set(title="Lead: how far ahead to send", ylabel="updates")


def _variance(axis: "Axes", found: Prediction) -> None:
    losses = _losses(found)
    percent = [100 * p for p in losses]
    n = found.n
    axis.plot(percent, [theory.variance_inflation(p, n) for p in losses], color=_BLUE, label="mean of what\narrived")
    for mean_squared, name, style in ((0.0, "$g = 0$", _DASHED), (1.0, "$|g|^2 = s^2$", _DOTTED)):
        curve = [theory.horvitz_thompson_inflation(p, n, mean_squared) for p in losses]
        axis.plot(percent, curve, color=_ORANGE, linestyle=style, label=f"Horvitz-\nThompson,\n{name}")
    _over_loss(axis, found, [(found.variance_inflation, _BLUE)])
    axis.set_ylim(bottom=0.9)
    axis.set(title=f"Variance of a gradient over {n} ranks", ylabel="times that without loss")


def _ranks(found: Prediction) -> list[int]:
    most = max(1024, 2 * found.n)
    ranks = [2]
    while ranks[-1] < most:
        ranks.append(max(ranks[-1] + 1, min(most, round(ranks[-1] * 1.15))))
    return ranks


def _over_ranks(axis: "Axes", found: Prediction, marks: list[tuple[float, str]]) -> None:
    axis.axvline(found.n, color=_MARK, linewidth=1.0, zorder=1)
    for value, colour in marks:
        axis.plot([found.n], [value], "o", color=colour, markersize=5)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("ranks")


def _mixing(axis: "Axes", found: Prediction) -> None:
    ranks = _ranks(found)
    a1, a2 = zip(*(theory.mixing(found.p, n) for n in ranks), strict=True)
    axis.plot(ranks, a1, color=_BLUE, label="$a_1$: differences\nleft, tends to $p$")
    axis.plot(ranks, a2, color=_ORANGE, linestyle=_DASHED, label="$a_2$: mean disturbed,\ntends to 0")
    _over_ranks(axis, found, [(found.a1, _BLUE), (found.a2, _ORANGE)])
    axis.set_ylim(0, max(1.45 * max(a1), 1e-3))
    axis.set(title=f"Model averaging at {100 * found.p:g} % loss: mixing", ylabel="0 is perfect averaging")


def _rate(axis: "Axes", found: Prediction) -> None:
    ranks = _ranks(found)
    highest = 1.0
    for p in sorted({0.01, 0.4, found.p}):
        colour, style = (_BLUE, _LINE) if p == found.p else (_GREY, _DASHED if p == 0.4 else _DOTTED)
        curve = [theory.rate_factor(p, n) for n in ranks]
        highest = max(highest, *curve)
        axis.plot(ranks, curve, color=colour, linestyle=style, label=f"{100 * p:g} % loss")
    _over_ranks(axis, found, [(found.rate_factor, _BLUE)])
    axis.set_ylim(0, 1.4 * highest)
    axis.set(title=r"Model averaging: rate $O(1/\sqrt{nT})$, bound", ylabel="times that without loss")
