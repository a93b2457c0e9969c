"""Cost of retransmission and forward error correction: formulas against simulated losses and against the engine."""

import random

import pytest

from stormtorch import _engine
from stormtorch.theory import coding
from stormtorch.theory.coding import LinkModel


def losses(link: LinkModel, count: int, rng: random.Random) -> list[bool]:
    """Losses of consecutive datagrams on a link."""
    lose, recover = link.chain()
    state, fates = rng.random() < link.p, []
    for _ in range(count):
        fates.append(state)
        state = rng.random() >= recover if state else rng.random() < lose
    return fates


@pytest.mark.parametrize(("p", "burst", "apart"), [(0.05, 1.0, 1), (0.1, 8.0, 1), (0.1, 8.0, 4), (0.3, 1.0, 2)])
def test_blocks_fail_as_often_as_simulated_ones(p: float, burst: float, apart: int) -> None:
    link, rng = LinkModel(p=p, burst=burst, round_trip_s=0.04, chunk_s=1e-4), random.Random(7)
    chunks, tries = 24, 4000
    for m in (2, 5, 9):
        failed = 0
        for _ in range(tries):
            failed += sum(losses(link, apart * (chunks + m), rng)[::apart]) > m
        predicted = coding.block_failures(link, chunks, m, apart=apart)[m]
        assert failed / tries == pytest.approx(
            predicted, abs=4.0 * (predicted * (1.0 - predicted) / tries) ** 0.5 + 2e-3
        )


def test_parity_for_rare_failures_is_that_of_the_binomial() -> None:
    # k = 128, one failure in a thousand: 5, 12, 22, 42 and 66 % of parity at 1, 5, 10, 20 and 30 % of loss.
    for p, fraction in [(0.01, 0.05), (0.05, 0.12), (0.1, 0.22), (0.2, 0.42), (0.3, 0.66)]:
        parity = coding.parity_for(LinkModel(p=p, round_trip_s=0.04, chunk_s=1e-4), 128)
        assert parity / 128 == pytest.approx(fraction, abs=0.015)


@pytest.mark.parametrize(("p", "chunks"), [(0.01, 50), (0.1, 300), (0.3, 300)])
def test_rounds_of_repair_are_those_of_simulated_messages(p: float, chunks: int) -> None:
    link, rng = LinkModel(p=p, round_trip_s=1.0, chunk_s=0.0), random.Random(3)
    tries, total, counted = 1500, 0, []
    for _ in range(tries):
        missing, rounds = sum(rng.random() < p for _ in range(chunks)), 0
        while missing:
            rounds += 1
            missing = sum(rng.random() < (p if rounds == 1 else p**2) for _ in range(missing))
        total += rounds
        counted.append(rounds)
    assert coding.repair_delay_s(link, chunks) == pytest.approx(total / tries, rel=0.15, abs=0.05)
    exceeded = sum(rounds > coding.repair_rounds_quantile(link, chunks) for rounds in counted) / tries
    assert exceeded <= 0.08


def test_coding_is_chosen_at_the_end_of_messages_on_long_lossy_links_only() -> None:
    far = LinkModel(p=0.1, burst=1.1, round_trip_s=0.04, chunk_s=1.2e-4)
    assert coding.choose(far, 256).way in ("coding", "hybrid")
    assert coding.choose(far, 512, after=20_000).way == "repair"
    assert coding.choose(LinkModel(p=0.1, round_trip_s=1e-4, chunk_s=1.2e-4), 256).way == "repair"
    assert coding.choose(LinkModel(p=0.0, round_trip_s=0.04, chunk_s=1.2e-4), 256).way == "none"
    assert coding.choose(far, 256, budget=0.2).way == "none"
    slow = LinkModel(p=0.1, round_trip_s=0.04, chunk_s=4e-3)
    assert coding.choose(slow, 256).way in ("hybrid", "repair")


def test_the_choice_costs_no_more_than_repair_or_any_other_parity() -> None:
    link = LinkModel(p=0.1, burst=4.0, round_trip_s=0.08, chunk_s=2e-4)
    choice = coding.choose(link, 300)
    assert choice.cost_s < coding.repair_cost_s(link, 300)
    failures = coding.block_failures(link, choice.chunks, 100, apart=3)
    others = [coding.coding_cost_s(link, failures[m], 300, m, 3) for m in range(1, choice.parity + 10)]
    assert choice.cost_s == pytest.approx(min(others))


def test_more_messages_that_all_must_arrive_get_more_parity_each() -> None:
    link = LinkModel(p=0.1, round_trip_s=0.04, chunk_s=1.2e-4)
    few, many = coding.choose(link, 12), coding.choose(link, 12, messages=12)
    assert 0 < few.parity < many.parity
    assert coding.choose(link, 1, messages=12).parity >= 3  # tiny messages are simply sent several times


def test_the_engine_chooses_as_the_model_does() -> None:
    rng = random.Random(5)
    coded = 0
    for _ in range(150):
        link = LinkModel(
            p=rng.choice([0.0, 0.003, 0.02, 0.1, 0.25, 0.5]),
            burst=rng.choice([1.0, 3.0, 20.0]),
            round_trip_s=rng.choice([1e-4, 0.01, 0.08]),
            chunk_s=rng.choice([3e-5, 1.2e-4, 6e-4]),
        )
        chunks, after = rng.choice([1, 3, rng.randint(1, 512)]), rng.choice([0, 0, 100, 2000])
        messages = rng.choice([1, 12, 4032])
        choice = coding.choose(link, chunks, after=after, messages=messages)
        blocks = -(-chunks // coding.BLOCK_CHUNKS)
        chosen = _engine.parity_that_pays(
            link.p, link.burst, link.round_trip_s, link.chunk_s, chunks, blocks, after, messages
        )
        assert chosen == choice.parity, (link, chunks, after, messages)
        coded += chosen > 0
    assert coded > 20


def test_links_that_make_no_sense_are_refused() -> None:
    for wrong in ({"p": 1.0}, {"p": -0.1}, {"p": 0.1, "burst": 0.5}):
        with pytest.raises(ValueError, match="must"):
            LinkModel(round_trip_s=0.1, chunk_s=1e-4, **wrong)
