import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stormtorch.doctor.advice import advise, predict_cost
from stormtorch.doctor.diagnosis import Level
from stormtorch.doctor.examination import DirectedLink, Examination, Rank
from stormtorch.doctor.verdict import culprits, examine, sentence

pytestmark = pytest.mark.pure

Direction = tuple[int, int]


def rank(number: int, **changes: Any) -> Rank:
    plain = Rank(
        rank=number,
        host=f"h{number}",
        address=f"198.18.0.{number + 1}",
        port=4000 + number,
        tcp_port=5000,
        mtu=1500,
        asked_buffer=8 << 20,
        receive_buffer=8 << 20,
        versions={"stormtorch": "1.0", "torch": "2.13.0", "python": "3.11.7"},
    )
    return replace(plain, **changes)


def link(source: int, target: int, **changes: Any) -> DirectedLink:
    plain = DirectedLink(
        source=source,
        target=target,
        received=True,
        tcp=True,
        lost="0" * 2000,
        round_trips_s=(1e-4,) * 40,
        clock_ahead_s=0.0,
        seen=f"198.18.0.{source + 1}",
        path_bytes=1500,
        rate_bits=1e8,
        sent_bits=1e9,
    )
    return replace(plain, **changes)


def network(
    world: int,
    links: Mapping[Direction, Mapping[str, Any]] | None = None,
    ranks: Mapping[int, Mapping[str, Any]] | None = None,
) -> Examination:
    """A healthy network with the given faults."""
    places = list(itertools.permutations(range(world), 2))
    return Examination(
        world=world,
        ranks={each: rank(each, **(ranks or {}).get(each, {})) for each in range(world)},
        links={place: link(*place, **(links or {}).get(place, {})) for place in places},
    )


def at_host(host: int, world: int, **changes: Any) -> dict[Direction, Mapping[str, Any]]:
    return {place: changes for place in itertools.permutations(range(world), 2) if host in place}


def at_link(first: int, second: int, **changes: Any) -> dict[Direction, Mapping[str, Any]]:
    return {(first, second): changes, (second, first): changes}


def found(measured: Examination) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.subject, each.ranks) for each in examine(measured) if each.level is Level.PROBLEM]


LOSSY: dict[str, Any] = {"lost": "0000000001" * 200}
SILENT: dict[str, Any] = {
    "received": False,
    "lost": "1" * 500,
    "round_trips_s": (),
    "seen": "",
    "path_bytes": 0,
    "rate_bits": 0.0,
}


def test_a_healthy_network_has_no_findings() -> None:
    measured = network(4)
    assert examine(measured) == []
    assert sentence(measured, []) == "All 12 links among 4 ranks are fine: the worst loses 0.0 %."


def test_a_bad_host_is_told_from_a_bad_link() -> None:
    assert found(network(4, at_host(2, 4, **LOSSY))) == [("loss", (2,))]
    assert found(network(4, at_link(1, 3, **LOSSY))) == [("loss", (1, 3))]
    assert found(network(4, {(3, 1): LOSSY})) == [("loss", (3, 1))]


def test_a_host_that_only_sends_badly_is_told_so() -> None:
    links: dict[Direction, Mapping[str, Any]] = {(2, other): LOSSY for other in (0, 1, 3)}
    (finding,) = examine(network(4, links))
    assert finding.ranks == (2,)
    assert finding.text == "All links from h2 lose 10.0 % of the datagrams: the fault is at h2."


def test_of_two_ranks_the_link_is_at_fault() -> None:
    assert found(network(2, at_host(1, 2, **LOSSY))) == [("loss", (0, 1))]


def test_a_bad_host_and_a_bad_link_are_both_named() -> None:
    assert found(network(5, at_host(4, 5, **LOSSY) | at_link(0, 1, **LOSSY))) == [("loss", (4,)), ("loss", (0, 1))]


def test_what_all_links_lose_is_nobodys_fault_in_particular() -> None:
    everywhere = {place: LOSSY for place in itertools.permutations(range(4), 2)}
    (finding,) = examine(network(4, everywhere))
    assert finding.ranks == ()
    assert finding.text == "All links lose 10.0 % of the datagrams: no single host is at fault."
    worse = {"lost": "001" * 700}
    assert found(network(4, everywhere | at_host(1, 4, **worse))) == [("loss", ()), ("loss", (1,))]
    assert found(network(4, {place: SILENT for place in everywhere})) == [("UDP blocked", ())]
    assert found(network(4, {place: {"path_bytes": 1280} for place in everywhere})) == [("path MTU", ())]


def test_a_rare_loss_is_worth_knowing_and_a_stray_one_is_not() -> None:
    rare = network(3, at_link(0, 1, lost="1111" + "0" * 1996))
    assert [each.level for each in examine(rare)] == [Level.NOTE]
    assert examine(network(3, at_link(0, 1, lost="11" + "0" * 1998))) == []


def test_what_a_full_buffer_loses_is_not_the_links_loss() -> None:
    buffer = {5: {"receive_buffer": 8192, "asked_buffer": 8192}}
    links: dict[Direction, Mapping[str, Any]] = {
        (each, 5): LOSSY | {"overflowed": 300, "overflowed_steady": 200} for each in range(5)
    }
    measured = network(6, links, buffer)
    assert found(measured) == [("receive buffer", (5,))]
    (finding,) = examine(measured)
    assert "dropped 1,500 datagrams" in finding.text


def test_a_buffer_that_the_kernel_limits_gets_the_sysctl() -> None:
    (finding,) = examine(network(3, ranks={1: {"receive_buffer": 212_992}}))
    assert (finding.level, finding.ranks) == (Level.NOTE, (1,))
    assert "sysctl -w net.core.rmem_max=8388608" in finding.remedy


def test_blocked_udp_is_told_from_an_unreachable_host() -> None:
    assert found(network(4, at_host(3, 4, **SILENT))) == [("UDP blocked", (3,))]
    assert found(network(4, at_host(3, 4, **SILENT, tcp=False))) == [("unreachable", (3,))]
    only_in: dict[Direction, Mapping[str, Any]] = {(each, 3): SILENT for each in range(3)}
    (finding,) = examine(network(4, only_in, {3: {"chosen_port": True, "port": 29500}}))
    assert finding.text == "UDP to port 29500 of h3 is blocked, but TCP gets through: a firewall drops UDP."
    assert "udp dport 29500 accept" in finding.remedy


def test_one_way_of_a_link_may_be_blocked_alone() -> None:
    (finding,) = examine(network(3, {(0, 2): SILENT}))
    assert finding.ranks == (0, 2)
    assert "the link from h0 to h2" in finding.text


def test_a_narrow_link_and_a_slow_link_are_named_with_their_remedy() -> None:
    (narrow,) = examine(network(4, at_link(0, 3, path_bytes=1280)))
    assert (narrow.subject, narrow.ranks) == ("path MTU", (0, 3))
    assert "datagram_bytes=1252" in narrow.remedy
    (slow,) = examine(network(4, at_link(1, 2, rate_bits=5e6)))
    assert (slow.subject, slow.ranks) == ("slow", (1, 2))
    assert "only 5 Mbit/s, where others carry 100 Mbit/s" in slow.text


def test_a_jumbo_interface_whose_path_carries_less_is_found() -> None:
    jumbo: dict[int, Mapping[str, Any]] = {each: {"mtu": 9000} for each in range(3)}
    links: dict[Direction, Mapping[str, Any]] = {
        place: {"path_bytes": 9000} for place in itertools.permutations(range(3), 2)
    }
    assert examine(network(3, links, jumbo)) == []
    assert found(network(3, links | at_link(0, 1, path_bytes=1500), jumbo)) == [("path MTU", (0, 1))]


def test_a_sender_that_is_slow_itself_blames_no_link() -> None:
    assert examine(network(4, at_link(0, 3, rate_bits=5e6, sent_bits=6e6))) == []


def test_nat_versions_and_clocks_are_named() -> None:
    translated = network(3, {(1, each): {"seen": "203.0.113.9"} for each in (0, 2)})
    (finding,) = examine(translated)
    assert (finding.subject, finding.ranks, finding.level) == ("NAT", (1,), Level.NOTE)
    assert "Options(nat=True)" in finding.remedy
    other = {2: {"versions": {"stormtorch": "0.9", "torch": "2.13.0", "python": "3.11.7"}}}
    assert found(network(3, ranks=other)) == [("versions", (2,))]
    ahead: dict[Direction, Mapping[str, Any]] = {(0, 1): {"clock_ahead_s": 60.0}, (1, 0): {"clock_ahead_s": -60.0}}
    ahead |= {(2, 1): {"clock_ahead_s": 60.0}, (1, 2): {"clock_ahead_s": -60.0}}
    (finding,) = examine(network(3, ahead))
    assert (finding.subject, finding.ranks) == ("clock", (1,))
    assert finding.text.startswith("The clock of h1 is 60.0 s ahead")


def test_a_missing_rank_is_named() -> None:
    measured = replace(network(3), world=4, missing={3: "rank 3 did not report within 5 s"})
    (finding,) = examine(measured)
    assert (finding.level, finding.text) == (Level.PROBLEM, "Rank 3 did not report within 5 s.")


def test_reordering_and_duplicates_are_worth_knowing() -> None:
    diagnoses = examine(network(3, at_link(0, 1, reordered=100, duplicates=50)))
    assert [(each.level, each.ranks) for each in diagnoses] == [(Level.NOTE, (0, 1))] * 2


def test_culprits_explain_every_bad_direction_once() -> None:
    places = list(itertools.permutations(range(5), 2))
    bad = [place for place in places if 2 in place or place == (0, 1)]
    explained = [place for each in culprits(bad, places) for place in each.links]
    assert sorted(explained) == sorted(bad)


def test_ranks_on_one_host_are_told_apart() -> None:
    measured = network(2, ranks={0: {"host": "node"}, 1: {"host": "node"}})
    assert measured.name(1) == "rank 1 (node)"


def test_advice_follows_the_network() -> None:
    assert advise(network(3)).options() == ""
    assert advise(network(3)).policy() == "BoundedDrift(reliability=EXACT)"
    narrow = network(3, at_link(0, 1, path_bytes=1280) | at_link(1, 2, **LOSSY))
    assert advise(narrow).options() == "Options(datagram_bytes=1252)"
    assert advise(narrow).policy() == "BoundedDrift()"
    far = network(3, {place: {"round_trips_s": (0.2,) * 40} for place in itertools.permutations(range(3), 2)})
    advice = advise(far)
    assert advice.eager_bytes == 4 << 20  # 100 Mbit/s times 0.2 s are 2.5 MB
    assert advice.silence_s == 20.0


def test_a_prediction_is_what_the_formulas_say() -> None:
    cost = predict_cost(network(4), 25_000_000)
    assert cost is not None
    # Each rank sends 2 * 3/4 of 100 MB over 100 Mbit/s.
    assert cost.drift_s == pytest.approx(12.0, rel=1e-3)
    assert cost.reliable_s == pytest.approx(12.0, rel=1e-3)
    assert cost.more_steps == pytest.approx(1.0)
    lossy = predict_cost(network(4, {place: LOSSY for place in itertools.permutations(range(4), 2)}), 25_000_000)
    assert lossy is not None
    # The train lost a tenth, so the link carries 111 Mbit/s; retransmission takes a tenth of that.
    assert lossy.drift_s == pytest.approx(10.8, rel=1e-3)
    assert lossy.reliable_s == pytest.approx(12.0, rel=1e-3)
    assert 1.0 < lossy.more_steps < 1.2


def test_a_slow_link_holds_up_a_ring_more_than_owners() -> None:
    slow = predict_cost(network(4, at_link(0, 1, rate_bits=1e7)), 25_000_000)
    assert slow is not None
    assert slow.reliable_s == pytest.approx(120.0, rel=1e-2)
    assert slow.drift_s == pytest.approx(40.0, rel=1e-2)  # this link carries 2/4 of the model


def test_what_the_targets_buffer_dropped_is_not_the_networks_loss() -> None:
    assert link(0, 1, lost="01" * 50, overflowed=50, overflowed_steady=50).loss == 0.0
    assert link(0, 1, lost="01" * 50, overflowed=20, overflowed_steady=20).loss == 0.3
