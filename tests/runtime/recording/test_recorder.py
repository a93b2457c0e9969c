# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Step records of real trainings over loopback: their content, their destination, and the cost of a full disk."""

import errno
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import local_world
from torch import nn

from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, faults, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy
from stormtorch.runtime.recording import record_making, recorder
from stormtorch.runtime.recording.record_file import RecordFile
from stormtorch.runtime.recording.status import status_text
from stormtorch.telemetry import line_file
from stormtorch.telemetry.ledger import Ledger, LedgerRow
from stormtorch.telemetry.record_files import Folder, read_run
from stormtorch.telemetry.records import ProcessId, Record
from stormtorch.udp import leaving
from stormtorch.udp.udp import UdpTransport

STEPS = 12


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recorder.EVERY_VARIABLE, "0.05")


def train(transport: UdpTransport, policy: Policy, steps: int = STEPS) -> Any:
    torch.manual_seed(transport.rank)
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = prepare(model, optimizer, policy=policy, group=Group(transport))
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.session.note(loss=loss)  # type: ignore[attr-defined]
        time.sleep(0.01)
    return optimizer


def of_kind(records: list[Record], kind: str) -> list[Record]:
    return [each for each in records if each["kind"] == kind]


@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging(every=3), GradientAveraging()])
def test_the_files_of_a_run_account_for_every_step(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(recorder.FOLDER_VARIABLE, str(tmp_path / "run"))
    with faults(loss=0.2, seed=1):
        ledgers = local_world(2, lambda transport: train(transport, policy).ledger.to_json())
    run = read_run(tmp_path / "run")
    assert [who.rank for who in run] == [0, 1]
    for who, records in run.items():
        assert records[0]["kind"] == "rank"
        assert (records[0]["rank"], records[0]["world"], records[0]["policy"]) == (who.rank, 2, type(policy).__name__)
        assert records[0]["parameters"] == 8 * 300 + 300 + 300 * 6 + 6
        assert [each["n"] for each in records] == list(range(len(records)))
        steps = of_kind(records, "steps")
        assert sum(each["steps"] for each in steps) == STEPS
        assert steps[-1]["step"] == STEPS - 1
        assert len(steps) >= 2
        wall_s = records[-1]["time"] - records[0]["time"]
        assert 0.0 < sum(each["seconds"] for each in steps) <= wall_s + 0.1
        rows = ledgers[who.rank]
        for name in ("bytes_sent", "gradient_wait_s", "broadcast_wait_s", "fetched"):
            assert sum(each[name] for each in steps) == pytest.approx(sum(row[name] for row in rows), rel=1e-5)
        arrived = sum(row["arrived"] for row in rows) / len(rows)
        assert sum(each["arrived"] * each["steps"] for each in steps) / STEPS == pytest.approx(arrived, rel=1e-5)
        assert all(set(each["gradients"]) <= {str(1 - who.rank)} for each in steps)
        assert steps[-1]["train_loss"] > 0.0
        links = of_kind(records, "links")[-1]
        assert list(links["links"]) == [str(1 - who.rank)]
        assert links["links"][str(1 - who.rank)]["path_bytes"] > 0
        assert links["health"]["faults_lost"] > 0
        assert of_kind(records, "view")[0]["members"] == [0, 1]
        assert (records[-1]["kind"], records[-1]["why"], records[-1]["step"]) == ("end", "done", STEPS)


def test_a_training_that_fails_says_why(tmp_path: Path) -> None:
    def work(transport: UdpTransport) -> None:
        optimizer = train(transport, BoundedDrift(), 2)
        path = optimizer.session.record(tmp_path)
        assert path.parent == tmp_path
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        local_world(2, work)
    run = read_run(tmp_path)
    assert len(run) == 2
    for records in run.values():
        assert records[0]["kind"] == "rank", "a file that begins late begins with what was kept"
        assert records[-1]["why"] == "RuntimeError: no more data"


def test_the_first_record_says_who_tells_however_quick_the_thread_is() -> None:
    def work(transport: UdpTransport) -> None:
        quick = recorder.Recorder(transport, every_s=0.01)
        time.sleep(0.2)
        assert quick.report(0)[1] == []
        optimizer = train(transport, BoundedDrift(), 3)
        assert optimizer.session.recorder is quick
        assert json.loads(quick.report(0)[1][0])["kind"] == "rank"

    local_world(2, work)


@pytest.mark.thorough
def test_records_tell_how_the_network_looks_while_no_step_ends() -> None:
    def work(transport: UdpTransport) -> dict[str, Record]:
        optimizer = train(transport, BoundedDrift(), 2)
        before = optimizer.session.recorder.report(0)[0]["next"]
        if transport.rank == 0:
            time.sleep(0.6)
        train_on(optimizer)
        told = [json.loads(line) for line in optimizer.session.recorder.report(before)[1]]
        return {each["kind"]: each for each in told if each["kind"] == "links" and each["waits"]}

    def train_on(optimizer: Any) -> None:
        model = optimizer.session.model
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    _, waited = local_world(2, work)
    waits = waited["links"]["waits"]
    assert waits["call"] == "backward()"
    assert waits["peers"] == [0]
    assert waits["seconds"] > 0.0


def test_a_rank_that_leaves_says_so_and_the_others_tell_of_the_view_without_it(tmp_path: Path) -> None:
    def work(transport: UdpTransport) -> None:
        optimizer = train(transport, BoundedDrift(), 3)
        optimizer.session.record(tmp_path)
        if transport.rank == 2:
            leaving._request_leave(transport)
            leaving.transfer_all(transport)
            return
        while len(optimizer.session.view.members) == 3 or optimizer.session.steps < 8:
            optimizer.session.model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    local_world(3, work)
    run = {who.rank: records for who, records in read_run(tmp_path).items()}
    assert run[2][-1]["why"] == "left"
    for rank in (0, 1):
        views = of_kind(run[rank], "view")
        assert [each["members"] for each in views] == [[0, 1, 2], [0, 1]]
        assert (views[1]["left"], views[1]["came"]) == ([2], [])
        assert any("rank 2 is gone" in each["text"] for each in of_kind(run[rank], "event"))
        assert list(of_kind(run[rank], "links")[-1]["links"]) == [str(1 - rank)]


def test_an_answer_is_bounded_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_TOLD_BYTES", 4000)
    monkeypatch.setattr(recorder, "_MOST_RECORDS", 20)

    def work(transport: UdpTransport) -> None:
        told_by = train(transport, BoundedDrift(), 3).session.recorder
        for number in range(50):
            told_by._add({"kind": "event", "time": 1.0, "step": number, "text": "x" * 300})
        since, found, answers = 0, [], 0
        while True:
            told, lines = told_by.report(since)
            assert sum(map(len, lines)) < 10_000
            found += [json.loads(line) for line in lines]
            since, answers = told["next"], answers + 1
            if not told["more"]:
                break
        assert answers >= 2
        assert found[0]["kind"] == "rank", "whoever comes late still learns who this is"
        kept = [each["n"] for each in found if each["kind"] in ("event", "links", "steps")]
        assert kept == list(range(kept[0], kept[0] + len(kept)))
        assert {each["step"] for each in of_kind(found, "event")} <= set(range(30, 50))
        for strange in (-5, 10**9):
            assert told_by.report(strange)[1]

    local_world(2, work)


def test_a_simulated_network_makes_no_records(tmp_path: Path) -> None:
    def work(transport: Any) -> None:
        model = nn.Linear(4, 4)
        _, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), group=Group(transport))
        assert optimizer.session.recorder is None  # type: ignore[attr-defined]
        optimizer.session.note(loss=1.0)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="simulated network makes no records"):
            optimizer.session.record(tmp_path)  # type: ignore[attr-defined]

    SimulatedNetwork(world=2).run(work)


def test_a_full_disk_delays_records_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile(tmp_path, ProcessId(3, 0, 1))
    full = True

    def add(_self: object, lines: bytes) -> OSError | None:
        return OSError(errno.ENOSPC, "No space left on device") if full else written.append(lines)  # type: ignore[func-returns-value]

    written: list[bytes] = []
    monkeypatch.setattr(line_file.LineFile, "add", add)
    with caplog.at_level(logging.WARNING, "stormtorch"):
        file.add([b"a\n"])
        file.add([b"b\n"])
        assert caplog.text.count("rank 3: cannot write records") == 1
        full = False
        file.add([b"c\n"])
    assert written == [b"a\nb\nc\n"]
    assert "can be written to" in caplog.text
    assert "lacks 0 of them" in caplog.text


def test_a_device_that_is_full_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    def work(transport: UdpTransport) -> int:
        optimizer = train(transport, BoundedDrift(), 1)
        told_by = optimizer.session.recorder
        told_by.write_to(Path("/tmp"))
        told_by._file.path.unlink(missing_ok=True)
        told_by._file._file = line_file.LineFile("/dev/full")
        time.sleep(0.3)
        return int(optimizer.session.steps)

    with caplog.at_level(logging.WARNING, "stormtorch"):
        assert local_world(2, work) == [1, 1]
    assert "No space left on device" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ValueError, match=r"rank 0: cannot write records to .*taken.*STORM_RECORD"):
        RecordFile(tmp_path / "taken", ProcessId(0, 0, 1))


@pytest.mark.parametrize("text", ["often", "0", "-1", "nan", "1e9"])
def test_a_strange_interval_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recorder.EVERY_VARIABLE, text)
    with pytest.raises(ValueError, match="STORM_RECORD_EVERY_S must be a number of seconds"):
        recorder._every_s()


def test_threads_of_recorders_end_with_their_transports() -> None:
    local_world(2, lambda transport: train(transport, BoundedDrift(), 1) and None)
    assert not [each for each in threading.enumerate() if each.name == "recorder"]


def test_two_optimizers_of_a_model_count_their_steps_once(tmp_path: Path) -> None:
    def work(transport: UdpTransport) -> None:
        model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 6))
        halves = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
        for each in halves:
            prepare(model, each, group=Group(transport))
        halves[0].session.record(tmp_path)  # type: ignore[attr-defined]
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            for each in halves:
                each.step()
                each.zero_grad()

    local_world(2, work)
    for records in Folder(tmp_path).read().values():
        assert sum(each["steps"] for each in of_kind(records, "steps")) == 5
        assert of_kind(records, "rank")[-1]["parameters"] == 8 * 300 + 300 + 300 * 6 + 6


def test_a_folder_that_is_named_twice_gets_every_record_once(tmp_path: Path) -> None:
    def work(transport: UdpTransport) -> None:
        session = train(transport, BoundedDrift(), 3).session
        path = session.record(tmp_path)
        time.sleep(0.3)  # the first call's records are written
        assert path == session.record(str(tmp_path) + "/.")

    local_world(2, work)
    for records in Folder(tmp_path).read().values():
        assert [each["n"] for each in records] == list(range(len(records)))


def test_an_optimizer_that_steps_alone_from_now_on_is_still_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_LEADER_S", 0.2)

    def work(transport: UdpTransport) -> None:
        model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 6))
        halves = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
        for each in halves:
            prepare(model, each, group=Group(transport))
        small = halves[1]
        small.session.record(tmp_path)  # type: ignore[attr-defined]
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            small.step()
            for each in halves:
                each.zero_grad()
        time.sleep(0.5)

    local_world(2, work)
    for records in Folder(tmp_path).read().values():
        assert sum(each["steps"] for each in of_kind(records, "steps")) == 5


@pytest.mark.pure
def test_rows_are_summed_up() -> None:
    rows = [
        LedgerRow(4, gradients={1: 0.5}, gradient_wait_s=0.25, bytes_sent=10, pair_drift=None, fetched=1),
        LedgerRow(
            5, gradients={1: 1.0, 2: 0.0}, gradient_wait_s=0.5, bytes_sent=5, pair_drift=0.5, guarded=True, lag={2: 1}
        ),
    ]
    record = record_making.steps_record(rows, {1: 7}, when=1.0, steps=2, seconds=1.5)
    assert record["gradients"] == {"7": 0.75, "2": 0.0}
    assert (record["gradient_wait_s"], record["bytes_sent"], record["fetched"], record["guarded"]) == (0.75, 15, 1, 1)
    assert (record["pair_drift"], record["lag"], record["arrived"]) == (0.5, {"2": 1}, 0.5)


@pytest.mark.pure
def test_a_copy_of_a_ledger_calls_nobody(tmp_path: Path) -> None:
    import copy

    ledger, seen = Ledger(), list[int]()
    callback: Callable[[LedgerRow], object] = lambda row: seen.append(row.step)  # noqa: E731
    ledger.on_row(callback)
    copy.deepcopy(ledger).add(LedgerRow(1))
    ledger.add(LedgerRow(2))
    assert seen == [2]


@pytest.mark.pure
def test_the_status_names_the_worst_link_and_the_wait() -> None:
    link = {"rtt_s": 0.001, "loss": 0.0, "rate": 0.0, "path_bytes": 1400, "heard_s": 0.1}
    latest: dict[str, Record] = {
        "rank": {"rank": 0, "world": 8, "incarnation": 1, "job": "j", "pid": 5, "host": "h", "policy": "BoundedDrift"},
        "steps": {"step": 9, "steps": 5, "seconds": 2.0, "time": 100.0, "arrived": 0.9},
        "view": {"number": 2, "step": 3, "members": [0, 1, 2, 4]},
        "links": {
            "links": {"1": link, "2": {**link, "loss": 0.1}, "4": {**link, "rtt_s": 0.5, "heard_s": 7.0}},
            "quorum": False,
            "waits": {"call": "backward()", "seconds": 3.0, "peers": [1, 2, 4]},
        },
    }
    text = status_text(latest, 101.0)
    assert text.startswith("rank 0 of 8, incarnation 1, job j, pid 5 on h, BoundedDrift\n")
    assert "step 9, 2.5 steps/s, the last 1.00 s ago, 90.00 % of the chunks arrived" in text
    assert "view 2 since step 3, members 0-2, 4" in text
    assert "worst link: with rank 2, loses 10.0 %" in text
    assert "silent: rank 4 for 7.0 s" in text
    assert "waits: 3.0 s in backward(), with rank 1-2, 4" in text
    assert "no majority" in text
