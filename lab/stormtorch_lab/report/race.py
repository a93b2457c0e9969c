"""Page of convergence over time: `bench convergence` and the race of the demo."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stormtorch_lab.report.parts import Fact, LineChart, Mark, Page, Section, Series, Table, colours_of
from stormtorch_lab.report.text import (
    called,
    listed,
    machine_rows,
    percent,
    ranks_of,
    requested_loss_text,
    seconds,
    times,
    where_text,
)

# Times that differ by less count as equal: repeated runs differ by as much.
_SAME = 1.05


@dataclass(frozen=True)
class Learner:
    """One backend's curve, as its JSON has it."""

    backend: str
    clock_s: list[float]
    steps: list[int]
    losses: list[float]
    arrived: float
    gave_up: bool
    label: str = ""
    """Label; with several files, including the name of the file."""

    @property
    def tcp(self) -> bool:
        """Whether this backend is gloo, which uses TCP."""
        return self.backend.startswith("gloo")

    @property
    def trained(self) -> bool:
        """Whether this backend has made a step."""
        return self.steps[-1] > 0

    def reached_s(self, loss: float) -> float | None:
        """Seconds until it first reached a loss, interpolated between evaluations; None if it did not."""
        return _crossing(self.clock_s, self.losses, loss)

    def loss_at(self, step: float) -> float:
        """Loss after that many steps, interpolated between evaluations."""
        for index in range(1, len(self.steps)):
            if self.steps[index] >= step:
                before, after = self.steps[index - 1], self.steps[index]
                share = (step - before) / (after - before)
                return self.losses[index - 1] + share * (self.losses[index] - self.losses[index - 1])
        return self.losses[-1]


@dataclass(frozen=True)
class Duel:
    """Two learners, and when each reached the lowest loss that both reached."""

    storm: Learner
    peer: Learner
    target: float
    storm_s: float
    peer_s: float

    @classmethod
    def of(cls, storm: Learner, peer: Learner) -> "Duel | None":
        """Compares two; None if one of them made no step."""
        target = max(min(storm.losses), min(peer.losses))
        storm_s, peer_s = storm.reached_s(target), peer.reached_s(target)
        if not storm_s or not peer_s:
            return None
        return cls(storm, peer, target, storm_s, peer_s)

    @property
    def ratio(self) -> float:
        """Factor by which the peer took longer."""
        return self.peer_s / self.storm_s


def learners_of(results: Sequence[dict[str, Any]], suffix: str = "") -> list[Learner]:
    """Reads curves from plain data."""
    return [
        Learner(
            backend=str(each["backend"]),
            clock_s=[float(value) for value in each["clock_s"]],
            steps=[int(value) for value in each["steps"]],
            losses=[float(value) for value in each["losses"]],
            arrived=float(each["arrived"]),
            gave_up=bool(each["gave_up"]),
            label=called(str(each["backend"])) + suffix,
        )
        for each in results
    ]


def tokens_per_s(learner: Learner, conditions: dict[str, Any]) -> float:
    """Tokens of all ranks per second of training."""
    made = learner.steps[-1] * conditions["batch"] * conditions["context"] * ranks_of(conditions)
    return float(made / learner.clock_s[-1]) if learner.clock_s[-1] else 0.0


def duels_of(learners: Sequence[Learner]) -> list[Duel]:
    """Compares the first storm backend with every peer, the fastest peer first."""
    ours = next((each for each in learners if not each.tcp), None)
    if ours is None:
        return []
    found = [duel for each in learners if each.tcp if (duel := Duel.of(ours, each)) is not None]
    return sorted(found, key=lambda duel: min(duel.peer.losses))


def race_verdict(conditions: dict[str, Any], learners: Sequence[Learner]) -> tuple[str, str]:
    """Returns the verdict, which training reached the loss first, and a tone."""
    ours = next((each for each in learners if not each.tcp), None)
    peers = [each for each in learners if each.tcp]
    if ours is None or not peers:
        return "Nothing to compare: a race needs stormtorch and a backend over TCP.", "plain"
    lost = requested_loss_text(conditions)
    if not ours.trained:
        return f"stormtorch made no step at {lost}: the run ended too early to compare.", "bad"
    duels = duels_of(learners)
    if not duels:
        waited = seconds(float(conditions["patience_s"]))
        who = listed([each.label for each in peers])
        if any(each.gave_up for each in peers):
            return f"At {lost} stormtorch trained, and {who} did not complete one step within {waited}.", "good"
        return f"stormtorch made {ours.steps[-1]} steps at {lost}; {who} had not been measured yet.", "plain"
    sentence, tone = _first_duel(duels[0], conditions)
    for duel in duels[1:]:
        sentence += f" {duel.peer.label} took {seconds(duel.peer_s)} to reach {duel.target:.2f}"
        sentence += f"; stormtorch took {seconds(duel.storm_s)} ({times(duel.ratio)})."
    stuck = [each.label for each in peers if not each.trained and each.gave_up]
    if stuck:
        sentence += f" {listed(stuck)} did not complete one step within {seconds(float(conditions['patience_s']))}."
    return sentence, tone


def _first_duel(duel: Duel, conditions: dict[str, Any]) -> tuple[str, str]:
    at = "Over a perfect network" if "requested" not in conditions and not conditions.get("faults") else ""
    at = at or f"At {requested_loss_text(conditions)}"
    goal = f"a validation loss of {duel.target:.2f}"
    ours, peer = seconds(duel.storm_s), seconds(duel.peer_s)
    if duel.ratio > _SAME:
        text = f"{at} stormtorch reached {goal} in {ours}; {duel.peer.label} took {peer} ({times(duel.ratio)} as long)."
        return text, "good"
    if duel.ratio < 1 / _SAME:
        text = f"{at} {duel.peer.label} reached {goal} in {peer}; stormtorch took {ours} "
        return text + f"({times(1 / duel.ratio)} as long).", "bad"
    return f"{at} stormtorch and {duel.peer.label} reached {goal} in the same time, {ours}.", "plain"


def race_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of one `bench convergence`, or of several side by side."""
    several = len(files) > 1
    learners: list[Learner] = []
    for name, data in files:
        learners += learners_of(data["results"], f" ({name})" if several else "")
    conditions = files[0][1]["conditions"]
    verdict, tone = race_verdict(conditions, learners)
    return Page(
        title="Time to the same loss",
        subtitle=subtitle(conditions, files[0][1]["results"]),
        verdict=verdict,
        tone=tone,
        facts=race_facts(conditions, learners),
        sections=race_sections(conditions, learners),
        conditions=race_conditions(conditions),
    )


def subtitle(conditions: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """Describes the model and the network."""
    params = max((int(each["params"]) for each in results), default=0)
    size = f" of {params / 1e6:.2g} M parameters" if params else ""
    return f"A language model{size} on {ranks_of(conditions)} ranks, {where_text(conditions)}"


def race_facts(conditions: dict[str, Any], learners: Sequence[Learner]) -> list[Fact]:
    """The figures in large print."""
    facts = []
    # If only stormtorch has losses, times to the same loss are not comparable, only speeds.
    fair = not conditions.get("faults")
    for duel in duels_of(learners)[:1] if fair else ():
        colour = "blue" if duel.ratio > _SAME else "vermilion" if duel.ratio < 1 / _SAME else "ink"
        facts.append(
            Fact(
                figure=times(duel.ratio),
                text=f"as long as stormtorch: {duel.peer.label} to the same loss",
                colour=colour,
            )
        )
    colours = colours_of([each.label for each in learners])
    for each in learners:
        if not each.tcp or each.trained:
            figure = f"{tokens_per_s(each, conditions):,.0f}"
            facts.append(Fact(figure=figure, text=f"tokens per second, {each.label}", colour=_colour(each, colours)))
    measured = conditions.get("loss_measured")
    if measured is not None:
        facts.append(Fact(figure=f"{100 * measured:.1f} %", text="of all packets lost, as measured"))
    return facts[:5]


def _colour(learner: Learner, fallback: dict[str, str]) -> str:
    return (
        colours_of([learner.backend])[learner.backend]
        if learner.label == called(learner.backend)
        else (fallback[learner.label])
    )


def race_sections(conditions: dict[str, Any], learners: Sequence[Learner]) -> list[Section]:
    """Loss against seconds, and against steps."""
    names = colours_of([each.label for each in learners])
    duels = duels_of(learners)
    marks = []
    if duels:
        first = duels[0]
        marks.append(Mark(y=first.target, text=f"loss {first.target:.2f}"))
        marks.append(Mark(x=first.storm_s, text=seconds(first.storm_s), colour=_colour(first.storm, names)))
        marks.append(Mark(x=first.peer_s, text=seconds(first.peer_s), colour=_colour(first.peer, names)))
    by_second = LineChart(
        title="Validation loss against seconds of training",
        x_label="seconds of training",
        y_label="validation loss, nats per byte",
        series=[
            Series(name=each.label, colour=_colour(each, names), x=each.clock_s, y=list(each.losses))
            for each in learners
            if each.trained
        ],
        marks=marks,
        note="Lower is better. The clock is that of the slowest rank, and stops for evaluations.",
    )
    by_step = LineChart(
        title="Validation loss against steps",
        x_label="steps",
        y_label="validation loss, nats per byte",
        series=[
            Series(name=each.label, colour=_colour(each, names), x=[float(s) for s in each.steps], y=list(each.losses))
            for each in learners
            if each.trained
        ],
        note="The same weights and batches: where the curves lie on each other, lost packets cost no accuracy.",
    )
    rows = [
        (
            each.label,
            each.steps[-1],
            f"{tokens_per_s(each, conditions):,.0f}" if each.trained else "-",
            f"{each.losses[-1]:.3f}",
            percent(each.arrived) if each.trained else "-",
            "aborted" if each.gave_up else "",
        )
        for each in learners
    ]
    table = Table(
        title="Final results",
        headings=("", "steps", "tokens per second", "last loss", "chunks arrived", ""),
        rows=[*rows],
    )
    return [
        Section(heading="The race", text=order_text(conditions), parts=[by_second, table]),
        Section(heading="Cost of packet loss", text=same_steps(learners), parts=[by_step]),
    ]


def order_text(conditions: dict[str, Any]) -> str:
    """Describes how the backends shared the machine."""
    order = conditions.get("order") or "one after the other, each in its own processes"
    return f"Same weights, same batches, same cores. Order: {order}."


def same_steps(learners: Sequence[Learner]) -> str:
    """Compares losses after as many steps as the peer made, which differ only by packet loss."""
    ours = next((each for each in learners if not each.tcp and each.trained), None)
    peers = [each for each in learners if each.tcp and each.trained]
    if ours is None or not peers:
        return ""
    peer = max(peers, key=lambda each: each.steps[-1])
    step = min(peer.steps[-1], ours.steps[-1])
    own, other = ours.loss_at(step), peer.loss_at(step)
    return (
        f"After the same {step} steps, {peer.label}, which loses nothing, had a loss of {other:.3f}; "
        f"stormtorch, with {percent(ours.arrived)} of its chunks received, had {own:.3f} ({own - other:+.3f})."
    )


def race_conditions(conditions: dict[str, Any]) -> list[tuple[str, str]]:
    """Conditions as rows."""
    return [
        ("network", where_text(conditions)),
        ("clock", str(conditions.get("clock", ""))),
        ("step", str(conditions.get("step", ""))),
        ("order", str(conditions.get("order") or "one after the other")),
        ("data", str((conditions.get("corpus") or {}).get("name", ""))),
        *machine_rows(conditions),
    ]


def _crossing(clock_s: list[float], losses: list[float], loss: float) -> float | None:
    for index, value in enumerate(losses):
        if value <= loss:
            if index == 0:
                return clock_s[0]
            before, since = losses[index - 1], clock_s[index - 1]
            return since + (before - loss) / (before - value) * (clock_s[index] - since)
    return None
