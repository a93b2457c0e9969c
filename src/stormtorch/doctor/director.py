"""Directs an examination: schedules the pairs of ranks that measure each other, and collects the results."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stormtorch.doctor.channels import Channel, WorkerLost
from stormtorch.doctor.datagrams import COOKIE_BYTES
from stormtorch.doctor.examination import DirectedLink, Examination, Rank
from stormtorch.telemetry.progress import Advance

_ROUND_S, _LEAST_ROUND_S, _MOST_S = 5.5, 1.0, 60.0
# Extra time for a rank to answer: the TCP connection of its requests suffers the same losses.
_GRACE_S = 15.0
Pair = tuple[int, int]


def round_robin(ranks: Sequence[int]) -> list[list[Pair]]:
    """Schedules every pair once, in rounds. A rank is in one pair of a round, so that its link carries one test."""
    players: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]  # the first one stays, the others rotate
    return rounds


def round_seconds(ranks: int, seconds: float | None) -> float:
    """Duration of one round: `seconds` is the total of all rounds; None takes the default."""
    rounds = max(ranks - 1 + ranks % 2, 1)
    total = min(_ROUND_S * rounds, _MOST_S) if seconds is None else seconds
    return max(total / rounds, _LEAST_ROUND_S)


def longest_request_gap_s(wait_s: float, seconds: float | None, ranks: int) -> float:
    """Longest time between two requests to a rank: while others join, or while it has no part in a round.

    Args:
        wait_s: How long the director waits for all ranks to report.
        seconds: Total of all rounds; None takes the default.
        ranks: Ranks of the job. With fewer of them present, rounds are longer; at least two take part.
    """
    longest_round_s = max(round_seconds(each, seconds) for each in range(2, max(ranks, 2) + 1))
    return max(wait_s, longest_round_s + 2 * _GRACE_S + 1.0)


class Director:
    """Directs the workers of all ranks through their channels.

    Args:
        channels: Channel to each rank.
        explain: Called with a lost rank and a short reason; returns the full reason.
    """

    def __init__(
        self, channels: Mapping[int, Channel], explain: Callable[[int, str], str] = lambda _rank, why: why
    ) -> None:
        self._channels, self._explain = channels, explain
        self._missing: dict[int, str] = {}
        self._links: dict[Pair, DirectedLink] = {}
        self._ranks: dict[int, Rank] = {}

    @property
    def present(self) -> list[int]:
        """Ranks that have reported and are not lost."""
        return sorted(self._ranks.keys() - self._missing.keys())

    def rendezvous(self, wait_s: float) -> Examination:
        """Waits up to `wait_s` for all ranks to report; returns the ranks present, without measurements."""
        deadline = time.monotonic() + wait_s

        def receive_self_report(rank: int) -> None:
            try:
                card = self._channels[rank].answer(deadline)
                if "failed" in card:
                    self._missing[rank] = f"{card.get('host', f'rank {rank}')} {card['failed']}"
                    return
                self._ranks[rank] = _rank(rank, card)
            except WorkerLost as error:
                self._missing[rank] = self._explain(rank, _waited(str(error), wait_s))

        _at_once([lambda rank=rank: receive_self_report(rank) for rank in self._channels])  # type: ignore[misc]
        return self._examination(0.0)

    def examine(self, seconds: float | None, advance: Advance) -> Examination:
        """Measures every pair of the ranks present."""
        begin = time.monotonic()
        present = sorted(self._ranks)
        cookie = secrets.token_hex(COOKIE_BYTES)
        world = len(self._channels)
        for rank in present:
            self._channels[rank].order({"order": "begin", "cookie": cookie, "world": world})
        each_s = round_seconds(len(present), seconds)
        rounds = round_robin(present)
        for number, pairs in enumerate(rounds):
            advance(f"round {number + 1} of {len(rounds)}: {_pairs_text(pairs)}", number)
            _at_once([lambda pair=pair: self._measure(pair, each_s) for pair in pairs])  # type: ignore[misc]
        advance("done", len(rounds))
        return self._examination(time.monotonic() - begin)

    def end(self) -> None:
        """Ends all workers."""
        for channel in self._channels.values():
            channel.order({"order": "end"})
        _at_once([channel.close for channel in self._channels.values()])

    def _examination(self, seconds: float) -> Examination:
        return Examination(
            world=len(self._channels),
            ranks=dict(self._ranks),
            missing=dict(self._missing),
            links=dict(self._links),
            seconds=seconds,
        )

    def _measure(self, pair: Pair, seconds: float) -> None:
        if any(rank in self._missing for rank in pair):
            return
        first, second = pair
        directions = [(first, second), (second, first)]
        result = self._answers(
            {a: {"order": "ask", "peer": self._peer(b), "seconds": seconds} for a, b in directions}, seconds
        )
        # The last datagrams may still be in flight.
        longest = max((max(each["round_trips_s"], default=0.0) for each in result.values()), default=0.0)
        time.sleep(min(0.1 + longest, 1.0))
        orders = {
            b: {"order": "report", "peer": a, "train": result[a]["train"], "sent": result[a]["sent"]}
            for a, b in directions
            if a in result and b not in self._missing
        }
        reports = self._answers(orders, 0.0)
        for a, b in directions:
            if a in result and b in reports:
                self._links[a, b] = _link(a, b, result[a], reports[b])

    def _answers(self, orders: Mapping[int, dict[str, Any]], seconds: float) -> dict[int, dict[str, Any]]:
        """Sends all requests, then waits for the answers. A rank that does not answer in time counts as missing."""
        for rank, order in orders.items():
            self._channels[rank].order(order)
        deadline = time.monotonic() + seconds + _GRACE_S
        answers = {}
        for rank in orders:
            try:
                answers[rank] = self._channels[rank].answer(deadline)
            except WorkerLost as error:
                self._missing[rank] = self._explain(rank, f"was lost during the examination: {error}")
        return answers

    def _peer(self, rank: int) -> dict[str, Any]:
        found = self._ranks[rank]
        return {"rank": rank, "host": found.address, "port": found.port, "tcp_port": found.tcp_port}


def _link(source: int, target: int, result: dict[str, Any], report: dict[str, Any]) -> DirectedLink:
    return DirectedLink(
        source=source,
        target=target,
        received=bool(report["heard"]),
        tcp=bool(result["tcp"]),
        lost=str(report["lost"]),
        overflowed=int(report["overflowed"]),
        overflowed_steady=int(report["overflowed_steady"]),
        duplicates=int(report["duplicates"]),
        reordered=int(report["reordered"]),
        round_trips_s=tuple(result["round_trips_s"]),
        clock_ahead_s=result["clock_ahead_s"],
        seen=str(result["seen"]),
        path_bytes=int(result["path_bytes"]),
        rate_bits=float(result["rate_bits"]),
        sent_bits=float(result["sent_bits"]),
    )


def _rank(rank: int, card: dict[str, Any]) -> Rank:
    known = {name: card[name] for name in Rank.__dataclass_fields__ if name in card}
    try:
        return Rank(**{**known, "rank": rank})
    except TypeError as error:
        raise WorkerLost(
            f"its self-report is incomplete ({error}): install the same version of stormtorch on all hosts"
        ) from error


def _waited(why: str, wait_s: float) -> str:
    return f"did not report within {wait_s:g} s" if why == "it does not answer" else why


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Runs all calls concurrently, one thread each, and raises the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _pairs_text(pairs: Sequence[Pair]) -> str:
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
    return shown + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")
