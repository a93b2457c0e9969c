import itertools
import json
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stormtorch.doctor import channels
from stormtorch.doctor.capture import write_links
from stormtorch.doctor.channels import StoreChannel, StoreWorkerChannel, WorkerLost
from stormtorch.doctor.diagnosis import Level
from stormtorch.doctor.director import Director, longest_request_gap_s, round_robin, round_seconds
from stormtorch.doctor.examination import DirectedLink, Examination
from stormtorch.doctor.verdict import examine
from stormtorch.doctor.worker import WorkerSettings, run_worker
from stormtorch.network.link_file import read_links
from stormtorch.network.loss import Bernoulli, Trace


class Near:
    """Both sides of the way to a rank that is a thread."""

    def __init__(self) -> None:
        self._orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def order(self, message: dict[str, Any]) -> None:
        self._orders.put(json.loads(json.dumps(message)))

    def receive(self) -> dict[str, Any] | None:
        return self._orders.get(timeout=60)

    def answer(self, deadline: Any) -> Any:
        if isinstance(deadline, dict):  # the worker's end
            self._answers.put(json.loads(json.dumps(deadline)))
            return None
        try:
            return self._answers.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise WorkerLost("it does not answer") from None

    def close(self) -> None:
        self._orders.put(None)


def examined(posts: list[WorkerSettings], seconds: float, missing: int = 0) -> Examination:
    ways = {settings.rank: Near() for settings in posts}
    threads = [
        threading.Thread(target=run_worker, args=(ways[settings.rank], settings), daemon=True) for settings in posts
    ]
    for thread in threads:
        thread.start()
    director = Director({**ways, **{len(posts) + each: Near() for each in range(missing)}})
    director.rendezvous(1.0 if missing else 20.0)
    found = director.examine(seconds, lambda _what, _done: None)
    director.end()
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()
    return found


@pytest.mark.pure
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13])
def test_every_pair_meets_once_and_no_rank_twice_in_a_round(ranks: int) -> None:
    rounds = round_robin([10 * each for each in range(ranks)])
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == sorted(itertools.combinations([10 * each for each in range(ranks)], 2))
    assert len(rounds) == ranks - 1 + ranks % 2


@pytest.mark.pure
def test_the_time_is_bounded_however_many_ranks_there_are() -> None:
    assert 3 * round_seconds(4, None) < 20
    assert 15 * round_seconds(16, None) <= 60
    assert round_seconds(4, 6.0) == 2.0


@pytest.mark.thorough
def test_ranks_on_loopback_measure_each_other_and_find_nothing_wrong() -> None:
    found = examined([WorkerSettings(rank=each, interface="127.0.0.1") for each in range(3)], 4.5)
    assert sorted(found.links) == sorted(itertools.permutations(range(3), 2))
    for link in found.links.values():
        assert link.received and link.tcp
        assert link.loss == 0.0 and link.sent > 100
        assert len(link.round_trips_s) > 30 and 0 < link.round_trips_s[0] < 1
        assert link.path_bytes > 60_000
        assert link.rate_bits > 1e6
        assert link.clock_ahead_s is not None and abs(link.clock_ahead_s) < 0.2
        assert link.seen == "127.0.0.1"
    assert [each for each in examine(found) if each.level is Level.PROBLEM] == []


def test_a_tiny_buffer_is_named_and_a_missing_rank_too() -> None:
    posts = [
        WorkerSettings(rank=0, interface="127.0.0.1"),
        WorkerSettings(rank=1, interface="127.0.0.1", receive_buffer_bytes=4096),
    ]
    found = examined(posts, 1.5, missing=1)
    problems = [(each.subject, each.ranks) for each in examine(found) if each.level is Level.PROBLEM]
    assert ("missing rank", (2,)) in problems
    assert ("receive buffer", (1,)) in problems
    assert sorted(found.links) == [(0, 1), (1, 0)]
    # Back-to-back trains overflow it; only drops of the steady train are subtracted from that train's loss.
    assert 0 <= found.links[0, 1].overflowed_steady < found.links[0, 1].overflowed
    assert found.links[1, 0].overflowed == 0


def test_a_rank_whose_port_is_taken_says_so() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        way = Near()
        run_worker(way, WorkerSettings(rank=0, interface="127.0.0.1", port=taken.getsockname()[1]))
    found = Director({0: way}).rendezvous(1.0)
    assert "cannot open UDP port" in found.missing[0] and "--port" in found.missing[0]


@pytest.mark.pure
def test_a_capture_is_a_file_of_links_that_others_read(tmp_path: Path) -> None:
    lost = "0" * 90 + "11" + "0" * 108
    links = {
        (0, 1): DirectedLink(source=0, target=1, received=True, tcp=True, lost=lost, round_trips_s=(0.02, 0.02)),
        (1, 0): DirectedLink(source=1, target=0, received=True, tcp=True, lost="0" * 200),
        (0, 2): DirectedLink(source=0, target=2, received=False, tcp=True, lost="1" * 200),
    }
    path = tmp_path / "links.json"
    write_links(Examination(world=3, ranks={}, links=links), path)
    read = read_links(path, 3)
    assert read.model(0, 1) == Trace(bits=lost)
    assert read.model(1, 0) == Bernoulli(p=0.0)
    assert read.model(0, 2) == Bernoulli(p=1.0)
    assert json.loads(path.read_text())["links"][0]["delay"] == "10.000ms"


class Shelf:
    """A store as far as orders need one."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, text: str) -> None:
        self._kept[key] = text.encode()

    def get(self, key: str) -> bytes:
        return self._kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wait_s", "seconds", "ranks", "least_s"),
    [
        (3600.0, None, 2, 3600.0),  # the first rank waits until the last one reports
        (60.0, 3600.0, 3, 1200.0),  # three rounds, in each of which one has nothing to do
        (60.0, 3600.0, 8, 1200.0),  # if five of them do not report
        (60.0, None, 2, 60.0),
    ],
)
def test_a_rank_waits_for_orders_as_long_as_the_director_may_take(
    wait_s: float, seconds: float | None, ranks: int, least_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_gap_s = longest_request_gap_s(wait_s, seconds, ranks)
    assert least_s <= request_gap_s <= 3600.0 + 60.0
    # A second of that pause is a millisecond here.
    monkeypatch.setattr(channels, "_SPARE_S", 0.2)
    shelf = Shelf()
    orders = StoreWorkerChannel(shelf, 1, request_gap_s / 1000)
    late = threading.Timer(least_s / 1000, lambda: StoreChannel(shelf, 1).order({"order": "end"}))
    late.start()
    assert orders.receive() == {"order": "end"}
    late.join()
    begun = time.monotonic()
    assert orders.receive() is None, "the director is gone"
    assert time.monotonic() - begun >= request_gap_s / 1000
