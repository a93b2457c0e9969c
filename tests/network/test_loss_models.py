import json
import math
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.network.faults import LinkOptions, faults
from stormtorch.network.link_file import read_links
from stormtorch.network.loss import Bernoulli, GilbertElliott, LinkFaults, LinkModel, PerLink, Shared, Stragglers, Trace

chances = st.floats(0.0, 1.0)
not_chances = st.one_of(st.floats().filter(lambda p: not 0.0 <= p <= 1.0), st.sampled_from(["0.1", None, True, [0.1]]))
bit_lists = st.lists(st.integers(0, 1), min_size=1)


def feasible(p: float, burst: float) -> bool:
    """Whether a Gilbert-Elliott chain exists, by its own definition: the chance to enter the bad state is at most 1."""
    return p == 0.0 or (p < 1.0 and p / (1.0 - p) / burst <= 1.0)


@given(p=chances)
def test_bernoulli_yields_its_rate(p: float) -> None:
    assert Bernoulli(p=p).link_faults() == LinkFaults(loss=p, burst=1.0, trace=b"")


@given(p=not_chances)
def test_a_rate_outside_0_to_1_is_refused_by_name(p: Any) -> None:
    with pytest.raises(ValueError, match=r"^p must"):
        Bernoulli(p=p)
    with pytest.raises(ValueError, match=r"^p must"):
        GilbertElliott(p=p, burst=1e9)


@given(p=chances, burst=st.floats(1.0, 1e6, exclude_min=True))
def test_a_burst_is_taken_exactly_when_such_a_chain_exists(p: float, burst: float) -> None:
    if p < 1.0 and math.isclose(p / (1.0 - p), burst, rel_tol=1e-6):
        return  # on the edge rounding decides
    if feasible(p, burst):
        assert GilbertElliott(p=p, burst=burst).link_faults() == LinkFaults(loss=p, burst=burst)
    else:
        with pytest.raises(ValueError, match=r"^burst "):
            GilbertElliott(p=p, burst=burst)


def test_a_chain_on_the_edge_of_the_feasible_is_taken_despite_rounding() -> None:
    for tenths in range(6, 10):
        GilbertElliott(p=tenths / 10, burst=tenths / 10 / (1 - tenths / 10))
    GilbertElliott(p=0.9, burst=9)
    GilbertElliott(p=1.0, burst=1.0)  # independent, so there is no chain to exist


@pytest.mark.parametrize("burst", [0.99, 0, -1, math.nan, math.inf, "8", None])
def test_a_burst_below_1_is_refused_by_name(burst: Any) -> None:
    with pytest.raises(ValueError, match=r"^burst must"):
        GilbertElliott(p=0.1, burst=burst)


@given(bits=bit_lists)
def test_a_trace_is_the_same_from_list_bytes_and_text(bits: list[int]) -> None:
    trace = Trace(bits=bits)
    assert trace.link_faults() == LinkFaults(loss=0.0, burst=1.0, trace=bytes(bits))
    assert trace == Trace(bits=bytes(bits)) == Trace(bits="".join(map(str, bits)))
    assert hash(trace) == hash(Trace(bits=bytes(bits)))
    assert pickle.loads(pickle.dumps(trace)) == trace


@pytest.mark.parametrize("bits", ["", [], b"", "012", [0, 2], b"01", [True], [1.0], "01 10", [-1], None, 7, [None]])
def test_bits_other_than_0_and_1_are_refused_by_name(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"^bits must"):
        Trace(bits=bits)


def test_traces_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "links.jsonl"
    rows = [{"path": "a", "bits": "0010"}, {"path": "b", "bits": "1"}, {"path": "c", "lost": [0, 1], "bits": "0"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Trace.from_file(path) == Trace(bits="0010")
    assert Trace.from_file(path, line=1) == Trace(bits="1")
    assert Trace.from_file(path, line=2, field="lost") == Trace(bits="01")
    assert Trace.all_from_file(path) == [Trace(bits="0010"), Trace(bits="1"), Trace(bits="0")]
    with pytest.raises(ValueError, match=r"line 3 does not exist.* 3 lines"):
        Trace.from_file(path, line=3)
    with pytest.raises(ValueError, match=r"^line must"):
        Trace.from_file(path, line=-1)
    with pytest.raises(ValueError, match=r"line 0: field 'lost' is missing"):
        Trace.from_file(path, field="lost")


@pytest.mark.parametrize("text", ["no json\n", "[1]\n", '{"bits": "2"}\n', '{"bits": 5}\n', '{"bits": ""}\n'])
def test_a_broken_line_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "links.jsonl"
    path.write_text('{"bits": "0"}\n' + text)
    assert Trace.from_file(path) == Trace(bits="0")
    for read in (lambda: Trace.from_file(path, line=1), lambda: Trace.all_from_file(path)):
        with pytest.raises(ValueError, match=r"links\.jsonl, line 1: "):
            read()


def test_links_without_a_model_follow_the_default() -> None:
    burst = GilbertElliott(p=0.2, burst=4)
    model = PerLink(default=Bernoulli(p=0.01), links={(0, 1): burst})
    assert model.model(0, 1) == burst
    assert model.model(1, 0) == Bernoulli(p=0.01)
    assert model.link_faults(0, 1) == LinkFaults(loss=0.2, burst=4.0)
    assert model.link_faults(1, 0) == LinkFaults(loss=0.01)
    assert PerLink().link_faults(3, 4) == LinkFaults()
    assert hash(model) == hash(PerLink(default=Bernoulli(p=0.01), links={(0, 1): burst}))
    assert pickle.loads(pickle.dumps(model)) == model


def test_the_links_are_copied() -> None:
    links: dict[tuple[int, int], Bernoulli | GilbertElliott | Trace] = {(0, 1): Bernoulli(p=0.5)}
    model = PerLink(links=links)
    links[0, 1] = Bernoulli(p=1.0)
    assert model.link_faults(0, 1).loss == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"default": 0.1}, r"^default must"),
        ({"default": PerLink()}, r"^default must"),
        ({"links": [(0, 1)]}, r"^links must"),
        ({"links": {(0, 1): 0.1}}, r"^links\[\(0, 1\)\] must"),
        ({"links": {(0, -1): Bernoulli(p=0)}}, r"^links must have keys"),
        ({"links": {(65536, 1): Bernoulli(p=0)}}, r"^links must have keys"),
        ({"links": {(0, 1, 2): Bernoulli(p=0)}}, r"^links must have keys"),
        ({"links": {"01": Bernoulli(p=0)}}, r"^links must have keys"),
        ({"links": {3: Bernoulli(p=0)}}, r"^links must have keys"),
    ],
)
def test_a_wrong_per_link_model_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerLink(**arguments)


@given(st.integers(0, 5).flatmap(lambda n: st.lists(st.lists(chances, min_size=n, max_size=n), min_size=n, max_size=n)))
def test_a_matrix_has_sources_in_rows_and_targets_in_columns(rows: list[list[float]]) -> None:
    model = PerLink.matrix(rows)
    for source, row in enumerate(rows):
        for target, p in enumerate(row):
            assert model.link_faults(source, target).loss == (0.0 if source == target else p)


def test_a_matrix_takes_models_and_must_be_square_and_valid() -> None:
    burst = GilbertElliott(p=0.2, burst=4)
    assert PerLink.matrix([[9.0, burst], [0.1, 9.0]]) == PerLink(links={(0, 1): burst, (1, 0): Bernoulli(p=0.1)})
    with pytest.raises(ValueError, match=r"^matrix must be square: row 1 has 1 entries"):
        PerLink.matrix([[0.0, 0.1], [0.1]])
    with pytest.raises(ValueError, match=r"^matrix\[1\]\[0\] must"):
        PerLink.matrix([[0.0, 0.1], [1.1, 0.0]])


def test_a_bad_sender_and_a_bad_rack_are_sets_of_links() -> None:
    bad, good = Bernoulli(p=0.5), GilbertElliott(p=0.01, burst=2)
    sender = PerLink.bad_sender(1, 3, bad, good)
    assert sender == PerLink(default=good, links={(1, 0): bad, (1, 2): bad})
    rack = PerLink.bad_rack([2, 3], 4, bad, good)
    assert rack.default == good
    assert set(rack.links) == {(a, b) for a in range(4) for b in range(4) if (a in (2, 3)) != (b in (2, 3))}
    assert set(rack.links.values()) == {bad}
    with pytest.raises(ValueError, match=r"^rank must lie in 0 to 2, got 3"):
        PerLink.bad_sender(3, 3, bad, good)
    with pytest.raises(ValueError, match=r"^ranks must lie in 0 to 2, got -1"):
        PerLink.bad_rack([-1], 3, bad, good)


def test_every_link_gets_a_trace_of_the_file_that_loses_neither_too_little_nor_too_much(tmp_path: Path) -> None:
    path = tmp_path / "links.jsonl"
    bits = ["0000000000", "1000000000", "0100000000", "1111000000"]
    path.write_text("".join(json.dumps({"loss": 0.0, "bits": each}) + "\n" for each in bits))
    made = PerLink.traces(path, 6, 1)
    assert set(made.links) == {(a, b) for a in range(6) for b in range(6) if a != b}
    assert set(made.links.values()) == {Trace(bits=bits[1]), Trace(bits=bits[2])}, "by what was lost, not what is said"
    assert made == PerLink.traces(path, 6, 1) != PerLink.traces(path, 6, 2)
    assert set(PerLink.traces(path, 6, 1, least=0.4, most=0.4).links.values()) == {Trace(bits=bits[3])}
    with pytest.raises(ValueError, match=r"has no line that loses 50 to 90 %: change least or most"):
        PerLink.traces(path, 6, 1, least=0.5, most=0.9)


def test_links_are_read_from_the_file_that_the_lab_reads(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"bits": "0"}\n{"bits": "0011"}\n')
    entries = [
        {"from": "*", "to": 2, "loss": 0.5},
        {"from": 0, "to": 2, "loss": 0.2, "burst": 8},
        {"from": 1, "to": 0, "trace": {"file": "traces.jsonl", "line": 1}},
        {"from": 2, "to": "*", "delay": "80ms"},
    ]
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"links": entries, "hosts": [{"host": 1, "rate": "10mbit"}]}))
    links: dict[tuple[int, int], LinkModel] = {
        (1, 2): Bernoulli(p=0.5),
        (0, 2): GilbertElliott(p=0.2, burst=8),
        (1, 0): Trace(bits="0011"),
    }
    assert read_links(path, 3) == PerLink(links=links)
    assert read_links(str(path), 3, default=Bernoulli(p=0.1)) == PerLink(default=Bernoulli(p=0.1), links=links)
    for world, change, message in (
        (2, {}, r"^links\[0\].to must .* 0 to 1, got 2"),
        (3, {"loss": 0.9, "burst": 2}, r"^links\[4\]: burst 2.0 is too short"),
        (3, {"trace": {}}, r"^links\[4\]: trace must name a 'file'"),
        (3, {"los": 1}, r"^links\[4\] has los"),
    ):
        path.write_text(json.dumps({"links": [*entries, {"from": 0, "to": 1, **change}]}))
        with pytest.raises(ValueError, match=message):
            read_links(path, world)
    with pytest.raises(ValueError, match=r"^cannot be read"):
        read_links(tmp_path / "none", 3)


@given(p=chances, share=chances)
def test_what_is_shared_and_what_is_not_lose_p_together(p: float, share: float) -> None:
    model = Shared(p=p, share=share)
    assert 0.0 <= model.own <= p + 1e-12
    assert 1.0 - (1.0 - model.common) * (1.0 - model.own) == pytest.approx(p)
    assert model.link_faults() == LinkFaults(loss=model.own, shared=p * share)
    assert faults(loss=model).settings["default"]["shared"] == p * share
    kept = faults(loss=model, links={(0, 1): {"delay_ms": 1}, (0, 2): 0.5, (0, 3): {"trace": "01"}}).settings["links"]
    assert (kept[0, 1]["loss"], kept[0, 1]["shared"]) == (model.own, model.common)
    assert (kept[0, 2]["loss"], kept[0, 2]["shared"], kept[0, 3]["shared"]) == (0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (Shared, {"p": 1.5, "share": 0.5}, "^p must"),
        (Shared, {"p": 0.5, "share": -0.5}, "^share must"),
        (Shared, {"p": 0.9, "share": 0.5, "burst": 2}, "^burst 2.0 is too short"),
        (Stragglers, {"chance": 2}, "^chance must"),
        (Stragglers, {"chance": 0.1, "delivered": 0.0}, "^delivered must"),
        (Stragglers, {"chance": 0.1, "delivered": 1.0}, "^delivered must"),
        (Stragglers, {"chance": 0.1, "delivered": "half"}, "^delivered must"),
        (Stragglers, {"chance": 0.1, "network": 0.1}, "^network must"),
        (Stragglers, {"chance": 0.1, "network": Stragglers(chance=0.1)}, "^network must"),
    ],
)
def test_a_wrong_model_of_many_links_is_refused_by_name(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**arguments)


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
        ({"loss": Bernoulli(p=0.1), "burst": 2}, "^burst goes with a loss rate"),
        ({"loss": PerLink(), "burst": 2}, "^burst goes with a loss rate"),
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
        ({"loss": Shared(p=0.1, share=1), "burst": 2}, "^burst goes with a loss rate"),
        ({"loss": Shared(p=0.1, share=1, burst=2)}, "^burst of shared loss must be 1"),
        ({"loss": Shared(p=0.1, share=1), "links": {(0, 1): {"burst": 2}}}, r"^links\[\(0, 1\)\]: burst has no effect"),
        ({"loss": Stragglers(chance=0.1)}, r"Stragglers.*deadline_s.*delay_ms"),
        ({"links": {(0, 1): {"los": 0.1}}}, r"^links\[\(0, 1\)\]: 'los' is no knob"),
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
    none = {**chances, "delay_ns": 0, "jitter_ns": 0, "trace": b""}
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
