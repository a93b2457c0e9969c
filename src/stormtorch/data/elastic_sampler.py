"""`ElasticSampler`: a distributed sampler that yields every sample once per epoch while ranks join and leave."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler

from stormtorch.checks import check
from stormtorch.data.epoch_position import EpochPosition, SamplerSettings
from stormtorch.data.spans import Spans

_log = logging.getLogger(__name__)


class _View(Protocol):
    """Current members, as reported by the session."""

    @property
    def number(self) -> int: ...
    @property
    def members(self) -> Sequence[int]: ...
    @property
    def base(self) -> int:
        """Number of the last earlier view that was installed on all its members.

        A gradient that a process is computing counts if and only if the process had installed that view.
        """
        ...


@runtime_checkable
class ElasticSession(Protocol):
    """What a sampler uses of a session whose ranks join and leave."""

    @property
    def view(self) -> _View:
        """The session's view; within a call of `take`, it is already the new one."""
        ...

    @property
    def group(self) -> Any:
        """The ranks that train together; `group.transport.rank` is this one, as numbered in views."""
        ...

    def carry(self, name: str, give: Callable[[], bytes], take: Callable[[dict[int, bytes]], None]) -> None:
        """Exchanges bytes among all members whenever the view changes.

        Each member of the earlier view contributes bytes by `give`, and each member of the new one receives all of
        them, its own included, by `take`. In a process that has just joined, and contributed nothing, `carry` itself
        calls `take` with the others' bytes.
        """
        ...

    def on_step(self, callback: Callable[[int], None]) -> None:
        """Calls back after every completed optimizer step, with its number."""
        ...


class ElasticSampler(Sampler[list[int]]):
    """Batch sampler that yields every sample once per epoch, over the present members.

    A batch counts once the optimizer step that used it is complete. Batches that a rank drew but did not use before it
    died or left are assigned to other ranks in the same epoch. A rank that joins gets a part of the remaining samples.

    All ranks make the same number of steps. The last samples are split into batches whose sizes differ by at most one.
    If fewer samples than ranks are left, a rank without one gets a batch that others train on, with `scale` 0.

    Args:
        data: The data set, or its length.
        batch_size: Most samples of a batch.
        seed: Random seed of the order of samples, which differs between epochs.
        shuffle: Whether samples come in a random order.
        drop_last: Whether to omit the last steps of an epoch if they have too few samples.
        batch: "per-rank" gives each rank one batch per step, so that the global batch follows the number of ranks.
            "constant" keeps the global batch at `batch_size` times the ranks at the start: with fewer ranks, each
            has several batches per step, and with more ranks smaller ones.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        batch: Literal["per-rank", "constant"] = "per-rank",
    ) -> None:
        length = data if isinstance(data, int) else len(data)
        check(length > 0, "data", "have at least one sample", length)
        check(batch_size > 0, "batch_size", "be at least 1", batch_size)
        check(batch in ("per-rank", "constant"), "batch", 'be "per-rank" or "constant"', batch)
        terms = SamplerSettings(
            length=length, batch_size=batch_size, constant=batch == "constant", drop_last=drop_last, shuffle=shuffle
        )
        distributed = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self._position = EpochPosition(terms, seed, rank, range(world))
        self._attached = False
        self._last_step: int | None = None
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None
        self._draws: _Draws | None = None  # the latest iterator, the only one that draws
        self._loop: object | None = None  # the latest loop over steps()
        # Batches since the latest iterator began: drawn, yielded by the loader, and assigned to other ranks since.
        self._drawn = self._yielded = self._revoked = 0
        self._scale: float | None = None
        self._more = False

    # --- the loop ---------------------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer, name: str = "sampler") -> None:
        """Counts the steps of an optimizer from now on and, if it is prepared, follows the views of its session.

        Call it on every rank, after `prepare` and before the first batch.

        Args:
            optimizer: The optimizer, prepared or not.
            name: Name of this sampler among those attached to the optimizer, the same on all ranks.
        """
        if self._attached or not self._position.untouched:
            raise RuntimeError("call attach() once, before the first batch: create another ElasticSampler")
        self._attached = True
        session = getattr(optimizer, "session", None)
        if session is None:
            optimizer.register_step_post_hook(lambda *_: self._stepped(None))
            return
        rank = session.group.transport.rank
        if not isinstance(session, ElasticSession):
            self._position.set_members(rank, 0, session.group.ranks)
            optimizer.register_step_post_hook(lambda *_: self._stepped(None))
            return
        self._position.set_members(rank, session.view.number, session.view.members)
        session_of = weakref.ref(session)  # the session keeps the sampler, so the sampler must not keep the session

        def take(given: dict[int, bytes]) -> None:
            if (found := session_of()) is not None:
                self._take(given, found.view)

        session.carry(name, self._give, take)
        session.on_step(self._stepped)

    def steps(self, loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
        """Yields the remaining steps of the epoch, each as an iterator over its batches.

        A step has one batch, or several under `batch="constant"`. The number of steps changes with the members.

        Args:
            loader: A DataLoader whose batch_sampler this is.
        """
        if loader.batch_sampler is not self:
            raise ValueError("steps() needs DataLoader(data, batch_sampler=sampler), with this sampler")
        if not getattr(loader, "in_order", True):
            raise ValueError("steps() needs batches in the order in which they were drawn: DataLoader(in_order=True)")
        self._check_inside()
        self._end_loop()  # a loop that an exception ended may not be closed yet
        loop = self._loop = object()
        position, source = self._position, self._source(loader)
        epoch = position.begin()
        try:
            while position.begin() == epoch and position.inside:
                batches = self._step(source)
                yield batches
                for _ in batches:  # those that the loop has not consumed
                    pass
                if position.busy:
                    position.step_done()  # it was not counted: a scaler skipped it, or no optimizer is attached
        finally:
            source.close()
            if self._loop is loop:
                self._end_loop()

    def accumulate(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for forward and backward of one batch, which exchanges gradients if it is the step's last.

        Args:
            model: The model, prepared or within DistributedDataParallel; any other one needs nothing.
        """
        no_sync: Callable[[], contextlib.AbstractContextManager[Any]] | None = getattr(model, "no_sync", None)
        return no_sync() if self._more and no_sync is not None else contextlib.nullcontext()

    @property
    def scale(self) -> float:
        """Factor for the mean loss of the present batch, so that the mean over ranks is the mean over all samples.

        It is 1 if all batches of a step have the same size, 1 / n for each of a rank's n equal batches in a step, and 0
        for a batch that other ranks train on.
        """
        if self._scale is not None:
            return self._scale
        position = self._position
        samples = sum(end - first for first, end in position.plan.batches(position.done, position.rank)[0])
        return position.plan.weight(position.done, samples)

    @property
    def global_batch(self) -> int:
        """Samples of the present step over all ranks."""
        return self._position.plan.samples(self._position.done)

    @property
    def micro_batches(self) -> int:
        """Batches of this rank in the present step."""
        return len(self._position.plan.batches(self._position.done, self._position.rank))

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0. The last completed step of an epoch begins the next one."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, unless it is the present one."""
        if epoch != self._position.epoch:
            self._position.go_to(epoch)
            self._draws = None

    # --- what DataLoader and checkpoints call -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        self._check_inside()
        self._position.rewind()
        self._drawn = self._yielded = self._revoked = 0
        self._last_step = None
        self._draws = _Draws(self, self._position.epoch)
        return self._draws

    def __len__(self) -> int:
        """Returns the number of this rank's batches in the epoch if the members stay the same."""
        return self._position.count()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the steps that are complete. Every rank has the same."""
        return self._position.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position that a job of any size has saved. All ranks must load the same one."""
        self._position.load(state)
        self._draws = None

    def _check_inside(self) -> None:
        position = self._position
        if not position.inside:
            raise RuntimeError(
                f"rank {position.rank} is not in view {position.view}, whose members are {list(position.members)}: it "
                "has left or was removed, and has no data to train on. End its loop"
            )

    def _draw(self, draws: _Draws, epoch: int) -> list[int]:
        position = self._position
        if draws is not self._draws or position.epoch != epoch:
            raise StopIteration
        if not self._attached and self._loop is None:
            # No optimizer reports complete steps: a loop that draws again has used its earlier batches.
            while position.epoch == epoch and position.done < position.drawn[0]:
                position.step_done()
            if position.epoch != epoch:
                raise StopIteration
        spans = position.draw()
        if spans is None:
            raise StopIteration
        self._drawn += 1
        return self._indices(spans)

    def _indices(self, spans: Spans) -> list[int]:
        terms, position = self._position.terms, self._position
        # A rank without samples gets a batch of others' samples, so that it takes part in the step.
        spans = spans or ((0, min(terms.batch_size, terms.length)),)
        if not terms.shuffle:
            return [index for first, end in spans for index in range(first, end)]
        key = (position.seed, position.epoch)
        if self._order is None or self._order[0] != key:
            generator = torch.Generator().manual_seed(position.seed + position.epoch)
            self._order = (key, torch.randperm(terms.length, generator=generator))
        order = self._order[1]
        return [index for first, end in spans for index in order[first:end].tolist()]

    # --- steps and views --------------------------------------------------------------------------------------------

    def _source(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        """Yields the loader's batches that still belong to this rank. A loader that ended too early begins again."""
        while True:
            empty = True
            for batch in loader:
                self._yielded += 1
                if self._yielded > self._revoked:
                    empty = False
                    yield batch
            if empty and self._revoked == 0:
                raise RuntimeError("the loader has ended before the epoch: give it no other sampler and no length")

    def _end_loop(self) -> None:
        position = self._position
        if self._loop is not None and position.busy:
            # The loop ended within a step. A step that is not known to be complete is repeated.
            if self._attached:
                position.put_back()
            else:
                position.step_done()
        self._loop = self._scale = None
        self._more = False

    def _step(self, source: Iterator[Any]) -> Iterator[Any]:
        position = self._position
        plan, step = position.plan, position.done
        batches = plan.batches(step, position.rank)
        for number, spans in enumerate(batches):
            batch = next(source)
            position.take_in_hand()
            self._scale = plan.weight(step, sum(end - first for first, end in spans))
            self._more = number + 1 < len(batches)
            yield batch

    def _stepped(self, number: int | None) -> None:
        position = self._position
        if self._loop is not None:
            if position.busy:
                position.step_done()
            return
        # A gap in the numbers counts steps that a scaler skipped.
        count = 1 if number is None or self._last_step is None else number - self._last_step
        self._last_step = number
        epoch = position.epoch
        for _ in range(count):
            if position.epoch == epoch and self._draws is not None and position.drawn > (position.done, 0):
                position.step_done()

    def _give(self) -> bytes:
        if self._loop is None and self._draws is not None:
            self._position.assume_busy()
        return self._position.give()

    def _take(self, given: dict[int, bytes], view: _View) -> None:
        if self._position.take(given, view.number, view.members, view.base):
            return
        self._revoked = self._drawn
        if self._drawn and self._loop is None:
            _log.warning(
                "rank %d rejoins in view %d: the batches that it had drawn were assigned to other ranks, and it may "
                "use up to %d of them again. Loops over sampler.steps(loader) skip them",
                *(self._position.rank, view.number, self._drawn),
            )


class _Draws:
    """Iterator over a rank's batches in an epoch. It may go on after its end if the plan has grown."""

    def __init__(self, sampler: ElasticSampler, epoch: int) -> None:
        self._sampler = sampler
        self._epoch = epoch

    def __iter__(self) -> _Draws:
        return self

    def __next__(self) -> list[int]:
        return self._sampler._draw(self, self._epoch)
