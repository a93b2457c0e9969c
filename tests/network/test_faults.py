"""Faults: which knobs are refused, and what the engine gets."""

import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.network.faults import LinkOptions, faults
from stormtorch.network.loss import Bernoulli, GilbertElliott, PerLink, Shared, Stragglers, Trace

not_chances = st.one_of(st.floats().filter(lambda p: not 0.0 <= p <= 1.0), st.sampled_from(["0.1", None, True, [0.1]]))

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("knob", ["loss", "duplicate", "reorder", "corrupt"])
@given(value=not_chances)
def test_faults_names_a_chance_outside_0_to_1(knob: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{knob} must"):
        faults(**{knob: value})
    with pytest.raises(ValueError, match=rf"^links\[\(2, 0\)\]: {knob} must"):
        faults(links={(2, 0): cast(LinkOptions, {knob: value})})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "^seed must"),
        ({"seed": 2**64}, "^seed must"),
        ({"seed": 0.5}, "^seed must"),
        ({"burst": 0.5}, "^burst must"),
        ({"loss": 0.9, "burst": 2}, "^burst 2.0 is too short for loss 0.9: it must be at least 9"),
        ({"loss": 1, "burst": 2}, "^burst must be 1 when loss is 1"),
        ({"loss": Bernoulli(p=0.1), "burst": 2}, "^burst must be given with a loss rate"),
        ({"loss": PerLink(), "burst": 2}, "^burst must be given with a loss rate"),
        ({"delay_ms": -1}, "^delay_ms must"),
        ({"delay_ms": math.inf}, "^delay_ms must"),
        ({"jitter_ms": -1}, "^jitter_ms must"),
        ({"jitter_ms": 4e6}, "^jitter_ms must"),
        ({"trace": "012"}, "^trace: bits must"),
        ({"trace": 3}, "^trace must"),
        ({"trace": "01", "loss": 0.1}, "^trace replaces loss"),
        ({"trace": "01", "burst": 4}, "^trace replaces loss"),
        ({"trace": "01", "loss": PerLink()}, "^trace replaces loss"),
        ({"links": [(0, 1)]}, "^links must"),
        ({"links": {(0, 70000): 0.1}}, "^links must have keys"),
        ({"links": {(0, 1): 1.5}}, r"^links\[\(0, 1\)\]: loss must"),
        ({"links": {(0, 1): None}}, r"^links\[\(0, 1\)\]: loss must"),
        ({"links": {(0, 1): PerLink()}}, r"^links\[\(0, 1\)\]: .*PerLink"),
        ({"links": {(0, 1): Shared(p=0.1, share=1)}}, r"^links\[\(0, 1\)\]: .*Shared"),
        ({"loss": Shared(p=0.1, share=1), "burst": 2}, "^burst must be given with a loss rate"),
        ({"loss": Shared(p=0.1, share=1, burst=2)}, "^burst of shared loss must be 1"),
        ({"loss": Shared(p=0.1, share=1), "links": {(0, 1): {"burst": 2}}}, r"^links\[\(0, 1\)\]: burst has no effect"),
        ({"loss": Stragglers(chance=0.1)}, r"Stragglers.*deadline_s.*delay_ms"),
        ({"links": {(0, 1): {"los": 0.1}}}, r"^links\[\(0, 1\)\]: 'los' is no setting"),
        ({"links": {(0, 1): {"delay_ms": "5"}}}, r"^links\[\(0, 1\)\]: delay_ms must"),
        ({"trace": "01", "links": {(0, 1): {"burst": 4}}}, r"^links\[\(0, 1\)\]: burst has no effect"),
        ({"loss": 0.1, "burst": 2, "links": {(0, 1): {"loss": 0.9}}}, r"^links\[\(0, 1\)\]: burst 2.0 is too short"),
    ],
)
def test_faults_names_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        faults(**arguments)


def test_settings_are_what_the_engine_takes() -> None:
    made = faults(loss=0.1, burst=8, duplicate=0.01, delay_ms=1.5, jitter_ms=0.000001, seed=7).settings
    chances = {"loss": 0.0, "burst": 1.0, "shared": 0.0, "duplicate": 0.0, "reorder": 0.0, "corrupt": 0.0}
    none = {**chances, "burst_ns": 0, "delay_ns": 0, "jitter_ns": 0, "trace": b""}
    expected = {**none, "loss": 0.1, "burst": 8.0, "duplicate": 0.01, "delay_ns": 1_500_000, "jitter_ns": 1}
    assert made == {"seed": 7, "default": expected, "links": {}}
    assert faults().settings == {"seed": 0, "default": none, "links": {}}
    assert faults(trace=[0, 1]).settings["default"] == {**none, "trace": b"\x00\x01"}
    assert faults(loss=Trace(bits="01")).settings["default"] == {**none, "trace": b"\x00\x01"}


def test_a_link_keeps_what_its_entry_does_not_name() -> None:
    made = faults(
        loss=0.1,
        burst=8,
        delay_ms=1,
        links={
            (0, 1): 1.0,
            (0, 2): GilbertElliott(p=0.2, burst=3),
            (0, 3): {"loss": 0.2},
            (0, 4): {"delay_ms": 2, "burst": 1},
            (0, 5): {"trace": "1"},
        },
    ).settings
    default, links = made["default"], made["links"]
    assert links[0, 1] == {**default, "loss": 1.0, "burst": 1.0}
    assert links[0, 2] == {**default, "loss": 0.2, "burst": 3.0}
    assert links[0, 3] == {**default, "loss": 0.2}
    assert links[0, 4] == {**default, "delay_ns": 2_000_000, "burst": 1.0}
    assert links[0, 5] == {**default, "loss": 0.0, "burst": 1.0, "trace": b"\x01"}


def test_links_refine_a_per_link_model() -> None:
    loss = PerLink(default=Trace(bits="01"), links={(0, 1): Bernoulli(p=0.5), (0, 2): Bernoulli(p=0.6)})
    made = faults(loss=loss, corrupt=0.1, links={(0, 1): {"delay_ms": 3}, (0, 3): {"reorder": 1.0}}).settings
    default, links = made["default"], made["links"]
    assert default["trace"] == b"\x00\x01"
    assert links[0, 1] == {**default, "trace": b"", "loss": 0.5, "delay_ns": 3_000_000}
    assert links[0, 2] == {**default, "trace": b"", "loss": 0.6}
    assert links[0, 3] == {**default, "reorder": 1.0}
