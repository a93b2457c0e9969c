"""Loss models: rates, bursts, traces, and models of many links."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.network.faults import faults
from stormtorch.network.loss import Bernoulli, GilbertElliott, LinkFaults, PerLink, Shared, Stragglers, Trace

chances = st.floats(0.0, 1.0)
not_chances = st.one_of(st.floats().filter(lambda p: not 0.0 <= p <= 1.0), st.sampled_from(["0.1", None, True, [0.1]]))
bit_lists = st.lists(st.integers(0, 1), min_size=1)

pytestmark = pytest.mark.pure


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
