"""Recorder of a process: makes step and link records, keeps the latest in memory, and writes them to a file.

It works in its own thread, once a second. A step only leaves a ledger row there, so that a slow disk or many links do
not delay training. While no step ends, the thread still records the links: then they are needed most.
`stormtorch.joining.admission` sends the records to processes that watch the job.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch

from stormtorch.errors import StormError
from stormtorch.runtime.recording import record_making as making
from stormtorch.runtime.recording.metrics_server import VARIABLE as METRICS_VARIABLE
from stormtorch.runtime.recording.metrics_server import MetricsServer
from stormtorch.runtime.recording.record_file import RecordFile
from stormtorch.runtime.recording.record_making import Recorded
from stormtorch.runtime.recording.status import status_text
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch.telemetry.records import ProcessId, Record, line_of

_log = logging.getLogger("stormtorch")

FOLDER_VARIABLE = "STORM_RECORD"
"""Environment variable with the folder to which a training writes its records."""
EVERY_VARIABLE = "STORM_RECORD_EVERY_S"
"""Environment variable with the seconds between two records of a kind."""
EVERY_S = 1.0
_MOST_RECORDS = 4096
_MOST_BYTES = 8 << 20
_TOLD_BYTES = 256 << 10
# Most rows that wait for a record; one second brings fewer.
_MOST_ROWS = 20_000
# Wait limit for a leader's step: an optimizer that is no longer used never makes one.
_LEADER_S = 5.0
# Wait limit for the disk at the end of training.
_END_S = 2.0

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_registered_in = -1


class _Training:
    """The recorder's state of one session."""

    def __init__(self, session: Recorded, number: int) -> None:
        self.session = weakref.ref(session)
        self.number = number
        self.parameters = sum(each.numel() for each in session.parameters)
        self.counted = session.steps
        self.ended_at = time.perf_counter()
        self.view: tuple[int, ...] = ()
        self.leader = self
        """Largest session of the same model. Optimizers of one model step together, and the leader counts the steps."""
        # A session of a subset of ranks numbers them from 0; records have the ranks of the transport.
        group = session.group
        some = len(group.ranks) < group.transport.world
        self.ranks = dict(enumerate(group.ranks)) if some else {}


class Recorder:
    """Records of one transport, and of all sessions on it.

    Args:
        transport: A transport over UDP; held weakly.
        every_s: Seconds between two records of a kind.
    """

    def __init__(self, transport: Any, every_s: float = EVERY_S) -> None:
        self._transport = weakref.ref(transport)
        self._owner = os.getpid()
        self.who = ProcessId(transport.rank, transport.incarnation(transport.rank), self._owner)
        self.every_s = every_s
        self._lock = threading.Lock()
        self._recent_lines: deque[bytes] = deque()
        self._recent_bytes = 0
        self._next = 0
        self._latest: dict[str, Record] = {}
        self._identity_lines: dict[str, tuple[int, bytes]] = {}
        self._rows: deque[tuple[_Training, LedgerRow, float, float]] = deque(maxlen=_MOST_ROWS)
        self._trainings: list[_Training] = []
        self._latest_loss: Any = None
        self._skips_links = True
        self._unwritten: deque[bytes] = deque(maxlen=_MOST_RECORDS)
        self._file: RecordFile | None = None
        self._retired: list[RecordFile] = []
        """Replaced files. The thread closes them, because it may be writing to them."""
        self.metrics: MetricsServer | None = None
        """Serves this rank's metrics, if the environment asks for it."""
        self._stopping = threading.Event()
        self._why = ""
        self.ended = False
        """Whether the last record is made or being made."""
        self._thread = threading.Thread(target=_work, args=(weakref.ref(self),), name="recorder", daemon=True)
        # The transport owns its recorder. The recorder and its thread hold the transport weakly.
        transport.reporter = self
        transport.on_close.append(self.end)
        _recorders.add(self)
        self._thread.start()

    # --- reports of sessions -----------------------------------------------------------------------------------------

    def attach_session(self, session: Recorded) -> None:
        """Begins to record a session."""
        training = _Training(session, len(self._trainings))
        # Sessions of the same model train together.
        beside = [each for each in self._trainings if (other := each.session()) and other.model is session.model]
        self._trainings = [each for each in self._trainings if each.session() is not None] + [training]
        parameters = training.parameters + sum(each.parameters for each in beside)
        for each in (*beside, training):
            each.leader = max((*beside, training), key=lambda each: (each.parameters, each.number))
        self._add(making.rank_record(session, parameters, time.time()))
        self.view(session)
        session.ledger.on_row(lambda row: self._rows.append((training, row, time.perf_counter(), time.time())))

    def view(self, session: Recorded) -> None:
        """Records that a session has begun a view."""
        training = next((each for each in self._trainings if each.session() is session), None)
        view = session.view
        if training is not None and training.view != view.members:
            before, training.view = training.view, view.members
            self._add(making.view_record(view.number, session.steps, view.members, before))

    def note(self, loss: Any) -> None:
        """Records the training loss: a number, or a tensor that is read only when a record is made."""
        self._latest_loss = loss.detach() if isinstance(loss, torch.Tensor) else float(loss)

    # --- files -------------------------------------------------------------------------------------------------------

    def write_to(self, folder: str | Path, every_s: float | None = None) -> Path:
        """Appends all records in memory, and all later ones, to a file in a folder. Returns its path."""
        if every_s is not None:
            self.every_s = every_s
        now = self._file
        if now is not None and now.path.parent.resolve() == Path(folder).resolve():
            return now.path  # already open
        file = RecordFile(folder, self.who)
        with self._lock:
            if self._file is not None:
                self._retired.append(self._file)
            self._unwritten.clear()
            first = self._next - len(self._recent_lines)
            self._unwritten.extend(line for number, line in self._identity_lines.values() if number < first)
            self._unwritten.extend(self._recent_lines)
            self._file = file
        return file.path

    # --- queries of other processes ----------------------------------------------------------------------------------

    def report(self, since: int) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the next record number to request, and the record lines from `since` on that fit into an answer."""
        with self._lock:
            first = self._next - len(self._recent_lines)
            if not 0 <= since <= self._next:
                since = 0  # the number belongs to another process
            # A reader that missed the beginning still needs the latest rank and view records.
            lines = [line for number, line in self._identity_lines.values() if since <= number < first]
            following, size = max(since, first), 0
            for line in itertools.islice(self._recent_lines, following - first, None):
                size += len(line)
                if size > _TOLD_BYTES and size > len(line):
                    break
                lines.append(line)
                following += 1
            more = following < self._next
        who = {"rank": self.who.rank, "incarnation": self.who.incarnation, "pid": self.who.pid}
        return who | {"next": following, "more": more}, lines

    def status(self) -> str:
        """Returns this rank's status as a few lines of text."""
        with self._lock:
            latest = dict(self._latest)
        return status_text(latest, time.time())

    def latest(self) -> dict[str, Record]:
        """Returns the latest record of each kind."""
        with self._lock:
            return dict(self._latest)

    # --- the thread --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Makes records of everything since the last call, and writes unwritten ones."""
        steps = self._latest.get("steps")
        self._sum_up()
        transport = self._transport()
        # Links change slowly and have the longest records: while steps end, every second call is enough.
        self._skips_links = (
            self._latest.get("steps") is not steps and not self._skips_links and not self._stopping.is_set()
        )
        # The rank record must be the first: this thread may run before a session is attached.
        introduced = "rank" in self._latest
        if introduced and transport is not None and not transport.closed and not self._skips_links:
            session = next((found for each in reversed(self._trainings) if (found := each.session())), None)
            members = () if session is None else session.view.members
            with contextlib.suppress(StormError, RuntimeError):  # closed meanwhile
                self._add(making.links_record(transport, members, 0 if session is None else session.steps))
        self._write()

    def _sum_up(self) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        leaders = [each[0] for each in rows if each[0].leader is each[0]]
        if not rows or (not leaders and time.perf_counter() - rows[0][2] < _LEADER_S):
            self._rows.extendleft(reversed(rows))  # wait for the leader's row
            return
        # Steps are counted from one session; waiting times and bytes are summed over all.
        training = max(leaders or [each[0] for each in rows], key=lambda each: (each.parameters, each.number))
        own = [row for each, row, _, _ in rows if each is training]
        ended_at, when = next((ended, when) for each, _, ended, when in reversed(rows) if each is training)
        beyond = own[-1].step + 1 - training.counted
        record = making.steps_record(
            own,
            training.ranks,
            when=when,
            steps=beyond if beyond > 0 else len(own),  # a checkpoint may have set the count back
            seconds=ended_at - training.ended_at,
        )
        for _, row, _, _ in [each for each in rows if each[0] is not training]:
            for name in ("gradient_wait_s", "broadcast_wait_s", "view_wait_s", "bytes_sent"):
                record[name] += getattr(row, name)
        training.counted, training.ended_at = own[-1].step + 1, ended_at
        record["train_loss"] = self._train_loss()
        for _, row, _, noticed in rows:
            for text in row.events:
                self._add({"kind": "event", "time": noticed, "step": row.step, "text": text})
        self._add(record)

    def _train_loss(self) -> float | None:
        noted = self._latest_loss
        try:
            return None if noted is None else float(noted)
        except (RuntimeError, ValueError):  # a tensor of several elements, or on a device that has failed
            return None

    def _add(self, record: Record) -> None:
        with self._lock:
            record["n"] = self._next
            line = line_of(record).encode() + b"\n"
            if record["kind"] in ("rank", "view"):
                self._identity_lines[record["kind"]] = self._next, line
            self._next += 1
            self._latest[record["kind"]] = record
            self._recent_lines.append(line)
            self._recent_bytes += len(line)
            while len(self._recent_lines) > _MOST_RECORDS or self._recent_bytes > _MOST_BYTES:
                self._recent_bytes -= len(self._recent_lines.popleft())
            if self._file is not None:
                self._unwritten.append(line)
            if self.metrics is not None:
                self.metrics.take(record)

    def _write(self) -> None:
        """Writes unwritten records without holding the lock, because a disk may be slow."""
        with self._lock:
            file, lines = self._file, list(self._unwritten)
            self._unwritten.clear()
            retired, self._retired = self._retired, []
        for each in retired:
            each.close()
        if file is not None:
            file.add(lines)

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Adds the last records, and waits up to `_END_S` until they are written."""
        if self.ended or os.getpid() != self._owner:
            return
        self.ended = True
        self._why = why
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def work(self) -> bool:
        """Does the thread's work for one interval. Returns False at the end."""
        over = self._stopping.wait(self.every_s) or self._transport() is None
        try:
            self.look()
            if over:
                step = max((found.steps for each in self._trainings if (found := each.session())), default=0)
                self._add({"kind": "end", "time": time.time(), "step": step, "why": self._why or "done"})
                self._write()
                if self._file is not None:
                    self._file.close()
                if self.metrics is not None:
                    self.metrics.close()
        except Exception:
            # An error here must not end training, and must not pass unnoticed.
            _log.warning("rank %d: a record could not be made", self.who.rank, exc_info=True)
        return not over


def _work(found: weakref.ref[Recorder]) -> None:
    while (recorder := found()) is not None and recorder.work():
        del recorder


def record_session(session: Recorded) -> Recorder | None:
    """Begins to record a session, unless its network is simulated. Writes a file if the environment names a folder.

    Raises:
        ValueError: The folder that the environment names cannot be written, or metrics cannot be served.
    """
    global _registered_in
    transport: Any = session.group.transport
    if not hasattr(transport, "reporter"):
        return None
    recorder: Recorder | None = transport.reporter
    if recorder is None or recorder.ended:
        recorder = Recorder(transport, _every_s())
        if _registered_in != os.getpid():
            _registered_in = os.getpid()
            atexit.register(_end_all)
        try:
            if folder := os.environ.get(FOLDER_VARIABLE):
                recorder.write_to(folder)
            # Only one transport of a process serves metrics: others would need another port.
            if (address := os.environ.get(METRICS_VARIABLE)) and not any(
                each.metrics and not each.ended for each in _recorders
            ):
                recorder.metrics = MetricsServer(address, recorder.who.rank)
        except ValueError:
            recorder.end("it could not record what the environment asks for")
            raise
    recorder.attach_session(session)
    return recorder


def _every_s() -> float:
    text = os.environ.get(EVERY_VARIABLE, "")
    try:
        every_s = float(text) if text else EVERY_S
    except ValueError:
        every_s = 0.0
    if not 0.01 <= every_s <= 3600.0:
        raise ValueError(f"{EVERY_VARIABLE} must be a number of seconds from 0.01 to 3600, got {text!r}")
    return every_s


def _end_all() -> None:
    """Ends all recorders: their threads must not run while the interpreter shuts down."""
    for recorder in list(_recorders):
        recorder.end("done")
