"""Page of the demo: the race over the clock, then what loss costs accuracy."""

from collections.abc import Sequence
from typing import Any

from stormtorch_lab.report.parts import Page, Section
from stormtorch_lab.report.race import (
    learners_of,
    race_conditions,
    race_facts,
    race_sections,
    race_verdict,
    subtitle,
    tokens_per_s,
)
from stormtorch_lab.report.text import percent, times
from stormtorch_lab.report.trainings import cost_sentence, training_sections, trainings_of


def demo_verdict(data: dict[str, Any]) -> tuple[str, str]:
    """Returns the verdict of the demo, and a tone."""
    race = data.get("race")
    if not race or not race["results"]:
        return "The demo ended before anything was measured.", "plain"
    learners = learners_of(race["results"])
    conditions = race["conditions"]
    if "requested" in conditions or not conditions.get("faults"):
        return race_verdict(conditions, learners)
    # No lab: TCP had a perfect network. Speeds are compared, and the sentence names the backend without loss.
    ours = next((each for each in learners if not each.tcp and each.trained), None)
    peer = next((each for each in learners if each.tcp and each.trained), None)
    lost = percent(conditions["faults"])
    if ours is None or peer is None:
        return f"stormtorch trained while {lost} of its datagrams were lost.", "plain"
    own, other = tokens_per_s(ours, conditions), tokens_per_s(peer, conditions)
    text = f"With {lost} of its datagrams lost, stormtorch trained at {own:,.0f} tokens/s; DDP on gloo, which lost "
    text += f"nothing, at {other:,.0f} ({times(other / own)} as many)" if other > own else f"nothing, at {other:,.0f}"
    return text + ". This machine allows no lab, so TCP could not be made to lose packets.", "plain"


_LEAD = (
    "Plain sends parameters as they are; lead extrapolates them a little, so that stale copies are right on average."
)


def busy_sentence(data: dict[str, Any]) -> str:
    """Warns if other work used the cores: waiting for a core hides the cost of the network."""
    machine = data["race"]["conditions"].get("machine") or {}
    load, cores = machine.get("load_before"), machine.get("cores_usable")
    if not load or not cores or load < 1.25 * cores:
        return ""
    return f"This machine was busy with other work (load {load:.0f} on {cores} cores), so its times are unreliable."


def accuracy_sentence(data: dict[str, Any]) -> str:
    """Describes the accuracy lost to packet loss; empty if not measured."""
    accuracy = data.get("accuracy")
    if not accuracy or not accuracy["results"]:
        return ""
    lost = float(accuracy["measured"].get("loss") or accuracy["settings"]["loss"])
    cost = cost_sentence(trainings_of([("", accuracy)]), round(lost, 3), int(accuracy["settings"]["steps"]))[0]
    return f"{cost} {_LEAD}"


def demo_page(files: Sequence[tuple[str, dict[str, Any]]]) -> Page:
    """Makes the page of one demo; of several, each has its sections."""
    sections: list[Section] = []
    for name, data in files:
        race = data["race"]
        learners = learners_of(race["results"]) if race else []
        made = race_sections(race["conditions"], learners) if learners else []
        if data.get("note"):
            made.insert(0, Section(heading="What is compared", text=f"{data['note']} {busy_sentence(data)}".strip()))
        if data.get("accuracy"):
            costs = training_sections(trainings_of([("", data["accuracy"])]))
            text = accuracy_sentence(data)
            made += [Section(heading="The same steps, with and without loss", text=text, parts=costs[0].parts)]
        if len(files) > 1:
            made = [Section(heading=f"{name}: {each.heading}", text=each.text, parts=each.parts) for each in made]
        sections += made
    data = files[0][1]
    race = data["race"]
    verdict, tone = demo_verdict(data)
    learners = learners_of(race["results"])
    return Page(
        title="stormtorch demo",
        subtitle=subtitle(race["conditions"], race["results"]),
        verdict=verdict,
        tone=tone,
        facts=race_facts(race["conditions"], learners) if learners else [],
        sections=sections,
        conditions=race_conditions(race["conditions"]),
    )
