"""Ledger: the record of a training step by step, with arrivals per link, staleness of copies and replica drift."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import weakref
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stormtorch.errors import Closed
from stormtorch.telemetry.ledger_file import LedgerFile
from stormtorch.telemetry.text import size_text

_log = logging.getLogger("stormtorch")
_MOST_ROWS = 10_000
_SHOWN_EVENTS = 10
# With fewer chunks, drift is mostly chance. Neighbouring steps share copies, so the error is estimated from this many
# parts of a job.
_MANY_CHUNKS, _PARTS = 32, 10
# A row with more links than this stores them packed: a dictionary of a thousand takes 60 KB.
_MOST_LOOSE = 64


class PackedLinks(Mapping[int, float]):
    """A compact mapping of many links, eight bytes each. `ranks` must be sorted; rows share it without a copy."""

    def __init__(self, ranks: Sequence[int], fractions: Sequence[float]) -> None:
        self._ranks, self._fractions = ranks, array("d", fractions)

    def __getitem__(self, rank: int) -> float:
        index = bisect_left(self._ranks, rank)
        if index == len(self._ranks) or self._ranks[index] != rank:
            raise KeyError(rank)
        return self._fractions[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        return repr(dict(self))


def pack_links(ranks: Sequence[int], fractions: Sequence[float]) -> Mapping[int, float]:
    """Returns the links of a row: a dictionary, or a compact mapping if there are many."""
    if len(ranks) > _MOST_LOOSE:
        return PackedLinks(ranks, fractions)
    return dict(zip(ranks, fractions, strict=True))


@dataclass
class LedgerRow:
    """One step as one rank saw it. Fractions count chunks; the key of a link is the peer's rank in the group."""

    step: int
    """Number of the step, from 0. Under `ModelAveraging`, only steps after which models are averaged have a row."""
    gradients: Mapping[int, float] = field(default_factory=dict)
    """Fraction of each peer's gradients that arrived at this rank. In a hierarchy of machines, peers are the ranks with
    this rank's position on other machines: each sends the mean of its machine; nothing is lost inside a machine."""
    broadcast: Mapping[int, float] = field(default_factory=dict)
    """Fraction of each owner's parameters that arrived at this rank. In a hierarchy of machines, it has the owners with
    this rank's position on other machines; ranks of this machine pass on the others, and `lag` counts all."""
    lag: dict[int, int] = field(default_factory=dict)
    """Number of chunks of others' parameters by their age in steps."""
    lead: float = 0.0
    """Updates by which this rank's broadcast led."""
    loss: float = 0.0
    """Fraction of this rank's broadcast that its receivers lost, smoothed."""
    pair_drift: float | None = None
    """Mean squared difference between this replica and another, over sampled elements that neither owns."""
    owner_drift: float | None = None
    """Mean squared difference between this replica and the owners, over sampled elements that others own."""
    update_variance: float | None = None
    """Mean square of one update, over the sampled elements of all owners."""
    pair_bound: float | None = None
    """Bound on the mean of `pair_drift` under the policy in use, with its lead and `max_lag`, at the measured loss p:
    `theory.pair_bound`, or 2p/(1-p)^2 times the mean square of the latest updates with the default lead."""
    published_bound: float | None = None
    """Bound on `pair_drift` as published for independent updates and no lead, 2p/(1+p) times `update_variance`.
    `pair_drift` may exceed it."""
    effective_batch: float = 1.0
    """Fraction of the ranks whose gradients are in the mean, over the chunks that this rank owns."""
    variance_inflation: float = 1.0
    """Factor by which the loss of gradients raises the variance of their mean."""
    bytes_sent: int = 0
    """Bytes of all datagrams that this rank's transport has sent since the previous row, whatever they were for."""
    parity_bytes: int = 0
    """Bytes of these that were parity, from which receivers decode lost chunks."""
    blocks_saved: int = 0
    """Blocks sent since the previous row whose losses parity recovered."""
    blocks_topped_up: int = 0
    """Blocks that lost more than parity could recover, so that chunks were retransmitted."""
    recovered: int = 0
    """Lost chunks that this rank decoded from parity."""
    gradient_wait_s: float = 0.0
    """Seconds that the rank spent only waiting for gradients."""
    broadcast_wait_s: float = 0.0
    """Seconds that the rank spent only waiting for parameters."""
    view_wait_s: float = 0.0
    """Seconds spent on a change of the view: waiting for its members, and moving shards."""
    fetched: int = 0
    """Chunks that would have exceeded `max_lag` and were fetched exactly, also for other ranks of this machine."""
    guarded: bool = False
    """Whether the convergence guard made the broadcast exact."""
    share: float | None = None
    """Fraction of the parameters that this rank owned; None if ranks own nothing."""
    late: dict[int, float] = field(default_factory=dict)
    """Ranks that were late, under a `deadline`: fraction of each one's buckets whose gradients are in the mean."""
    deadline_s: float | None = None
    """Deadline for gradients in this step, as this rank learned it: seconds from the arrival of its parameters."""
    missing: list[int] = field(default_factory=list)
    """Ranks of the group that are absent."""
    events: list[str] = field(default_factory=list)
    """Other events of the step, as text."""

    @property
    def arrived(self) -> float:
        """Mean fraction that arrived, over the links of both stages."""
        links = [*self.gradients.values(), *self.broadcast.values()]
        return sum(links) / len(links) if links else 1.0


class Summary(dict[str, Any]):
    """The main numbers of a job. Printing it shows the most important ones in five lines."""

    def __str__(self) -> str:
        waits = f"{self['gradient_wait_s']:.3g} s for gradients and {self['broadcast_wait_s']:.3g} s for parameters"
        guarded = f"; the guard made {self['guarded']} of them exact" if self["guarded"] else ""
        oldest = f"; the oldest copy was {self['most_lag']} steps old" if self["most_lag"] else ""
        parity = f", {size_text(self['parity_bytes'])} of it parity" if self["parity_bytes"] else ""
        events = self["events"]
        lines = [
            f"steps    {self['steps']}, waiting {waits}{guarded}",
            f"arrived  {self['arrived']:.2%} of the chunks{oldest}",
            f"sent     {size_text(self['bytes_sent'])}{parity}",
            f"drift    {self._drift()}",
            f"events   {len(events) or 'none'}",
        ]
        if len(events) > _SHOWN_EVENTS:
            lines.append(f"  the last {_SHOWN_EVENTS} of them:")
        return "\n".join([*lines, *(f"  {event}" for event in events[-_SHOWN_EVENTS:])])

    def _drift(self) -> str:
        """Describes the drift, with the expected one if enough chunks were sampled."""
        pair, bound, error = self["pair_drift"], self["pair_bound"], self["pair_error"]
        if not pair and not self["owner_drift"]:
            return "none"
        if pair is None:
            return f"{self['owner_drift']:.2g} from the owners' parameters (mean squares)"
        by_chance = "" if error is None or bound is None else f", expected {bound:.2g} ± {error:.1g}"
        return f"{pair:.2g} between two replicas{by_chance} (mean squares)"


class Ledger:
    """The latest ten thousand rows of a job."""

    def __init__(self) -> None:
        self.rows: deque[LedgerRow] = deque(maxlen=_MOST_ROWS)
        """Rows of complete steps, in order. A step is complete when its parameters have arrived."""
        self._steps = 0
        self._arrived = 0.0
        self._file: LedgerFile | None = None
        self._writer: Any = None
        self._wandb: Any = None
        self._on_row: list[Callable[[LedgerRow], object]] = []
        self._whose = ""
        self._complete: Callable[[], Callable[[], None] | None] = _nothing

    def attach_session(self, rank: int, complete: Callable[[], None]) -> None:
        """Sets the rank for warnings, and the method (weakly referenced) that completes the row of the last step."""
        self._whose = f"rank {rank}: "
        self._complete = weakref.WeakMethod(complete)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy: the rows, without the session, files and writers that follow it."""
        return {**self.__dict__, "rows": self.rows.copy(), **self._alone()}

    @staticmethod
    def _alone() -> dict[str, Any]:
        return {"_file": None, "_writer": None, "_wandb": None, "_on_row": [], "_complete": _nothing}

    def __repr__(self) -> str:
        if not self._steps:
            return "<Ledger: no steps yet>"
        guarded, events = sum(row.guarded for row in self.rows), sum(len(row.events) for row in self.rows)
        more = [f"{guarded} guarded"] * (guarded > 0) + [f"{events} event{'s' * (events > 1)}"] * (events > 0)
        return f"<Ledger: {', '.join([f'{self._steps} steps', f'{self._arrived / self._steps:.2%} arrived', *more])}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> LedgerRow:
        return self.rows[index]

    def add(self, row: LedgerRow) -> None:
        """Adds a complete row and passes it to all followers: file, TensorBoard, Weights & Biases, callbacks."""
        self.rows.append(row)
        self._steps += 1
        self._arrived += row.arrived
        if self._file is not None:
            self._file.add(f"{_line(row)}\n", row.step)
        if self._writer is not None:
            try:
                _write_scalars(self._writer, row)
            except OSError as error:
                self._writer = None
                _log.warning(
                    "%scannot write rows to TensorBoard: %s. It gets no rows from step %d on; the ledger keeps them, "
                    "and training continues",
                    *(self._whose, error, row.step),
                )

        if self._wandb is not None:
            try:
                self._wandb.log({"storm/step": row.step, **{f"storm/{name}": value for name, value in _scalars(row)}})
            except Exception as error:  # wandb raises exception types of its own, and may not be installed
                self._wandb = None
                _log.warning(
                    "%scannot log rows to Weights & Biases: %s. It gets no rows from step %d on; the ledger keeps "
                    "them, and training continues",
                    *(self._whose, error, row.step),
                )
        for callback in self._on_row:
            callback(row)

    def on_row(self, callback: Callable[[LedgerRow], object]) -> None:
        """Registers a callback for every complete row from now on; it runs in the training thread."""
        self._on_row.append(callback)

    def _complete_last_row(self) -> None:
        """Waits for the parameters of the last step, which completes its row."""
        complete = self._complete()
        if complete is not None:
            with contextlib.suppress(Closed):  # the job is over, and the row will never be complete
                complete()

    def summary(self) -> Summary:
        """Returns the main numbers of the job: `steps` and `arrived` over all steps, the rest over the rows kept.

        Waits for the parameters of the last step, to include it.
        """
        self._complete_last_row()
        rows = list(self.rows)
        numbers = {
            "steps": self._steps,
            "arrived": self._arrived / self._steps if self._steps else 1.0,
            "pair_drift": _mean([row.pair_drift for row in rows]),
            "owner_drift": _mean([row.owner_drift for row in rows]),
            "pair_bound": _mean([row.pair_bound for row in rows]),
            "pair_error": _error(rows),
            "published_bound": _mean([row.published_bound for row in rows]),
            "most_lag": max((max(row.lag) for row in rows if row.lag), default=0),
            "bytes_sent": sum(row.bytes_sent for row in rows),
            "parity_bytes": sum(row.parity_bytes for row in rows),
            "blocks_saved": sum(row.blocks_saved for row in rows),
            "blocks_topped_up": sum(row.blocks_topped_up for row in rows),
            "recovered": sum(row.recovered for row in rows),
            "gradient_wait_s": sum(row.gradient_wait_s for row in rows),
            "broadcast_wait_s": sum(row.broadcast_wait_s for row in rows),
            "guarded": sum(row.guarded for row in rows),
            "events": [event for row in rows for event in row.events],
        }
        return Summary(numbers)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns all rows so far as plain data."""
        self._complete_last_row()
        return [_plain(row) for row in self.rows]

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows for a checkpoint, as plain data and tensors."""
        rows = [{**vars(row), "gradients": None, "broadcast": None} for row in self.rows]
        links = {name: _tables([getattr(row, name) for row in self.rows]) for name in ("gradients", "broadcast")}
        return {"rows": rows, **links, "steps": self._steps, "arrived": self._arrived}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the rows by those of a checkpoint."""
        self.rows.clear()
        for row, gradients, broadcast in zip(
            state["rows"], _links_of(state["gradients"]), _links_of(state["broadcast"]), strict=True
        ):
            self.rows.append(LedgerRow(**row | {"gradients": gradients, "broadcast": broadcast}))
        self._steps, self._arrived = state["steps"], state["arrived"]

    def write(self, path: str | Path) -> None:
        """Writes all rows so far to a file, one line of JSON each."""
        self._complete_last_row()
        Path(path).write_text("".join(_line(row) + "\n" for row in self.rows))

    def follow(self, path: str | Path) -> None:
        """Appends every row from now on to a file, one line of JSON each.

        If a row cannot be written, as on a full disk, a warning is logged and training continues.
        """
        file = LedgerFile(path, self._whose, _MOST_ROWS)
        if self._file is not None:
            self._file.close()
        self._file = file

    def to_tensorboard(self, writer: Any) -> None:
        """Writes every row from now on to a `torch.utils.tensorboard.SummaryWriter`, under storm/."""
        self._writer = writer

    def to_wandb(self, run: Any) -> None:
        """Logs every row from now on to a run of Weights & Biases, as `wandb.init()` returns it, under storm/.

        These charts have `storm/step` as their axis; the step counter of the run stays the program's own.
        """
        run.define_metric("storm/step")
        run.define_metric("storm/*", step_metric="storm/step")
        self._wandb = run


def _nothing() -> None:
    """Completes no row. A module-level function, so that pickle can name it."""


def _error(rows: Sequence[LedgerRow]) -> float | None:
    """Returns the standard error of the mean `pair_drift`, from parts of the job; None with too few chunks."""
    found = [row.pair_drift for row in rows if row.pair_drift is not None and sum(row.lag.values()) >= _MANY_CHUNKS]
    size = len(found) // _PARTS
    if size < _PARTS:
        return None
    means = [sum(found[first : first + size]) / size for first in range(0, size * _PARTS, size)]
    middle = sum(means) / _PARTS
    return float((sum((each - middle) ** 2 for each in means) / (_PARTS * (_PARTS - 1))) ** 0.5)


def _tables(links: list[Mapping[int, float]]) -> list[tuple[list[int], torch.Tensor]]:
    """Packs consecutive rows with the same links into a table: the ranks, and a line per row."""

    def ranks_of(row: Mapping[int, float]) -> list[int]:
        return list(row)

    return [
        (ranks, torch.tensor([list(each.values()) for each in run], dtype=torch.float64))
        for ranks, run in itertools.groupby(links, key=ranks_of)
    ]


def _links_of(tables: list[tuple[list[int], torch.Tensor]]) -> Iterator[Mapping[int, float]]:
    for ranks, table in tables:
        for line in table:
            yield pack_links(ranks, line.tolist())


def _plain(row: LedgerRow) -> dict[str, Any]:
    links = {"gradients": dict(row.gradients), "broadcast": dict(row.broadcast)}
    return {**dataclasses.asdict(row), **links, "arrived": row.arrived}


def _line(row: LedgerRow) -> str:
    return json.dumps(_plain(row))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _scalars(row: LedgerRow) -> Iterator[tuple[str, float]]:
    """Names and values of all numbers of a row except the step."""
    for name, value in dataclasses.asdict(row).items():
        if isinstance(value, bool | int | float) and name != "step":
            yield name, float(value)
    yield "arrived", row.arrived
    for stage, links in (("gradients", row.gradients), ("broadcast", row.broadcast)):
        for peer, fraction in links.items():
            yield f"{stage}/from_{peer}", fraction


def _write_scalars(writer: Any, row: LedgerRow) -> None:
    for name, value in _scalars(row):
        writer.add_scalar(f"storm/{name}", value, row.step)
    for event in row.events:
        writer.add_text("storm/events", event, row.step)
