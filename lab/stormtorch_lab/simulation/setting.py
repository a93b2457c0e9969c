"""The setting of a simulation, for any policy: workers, network, model and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from stormtorch.collectives.formats.grid import GRIDS
from stormtorch.network.loss import LossModel
from stormtorch_lab.simulation.gradients import Gradients, How, Loss, trained
from stormtorch_lab.simulation.parameters.chunks import Chunks
from stormtorch_lab.simulation.parameters.rounding import round_to_grids_
from stormtorch_lab.simulation.processes import Processes

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for some parameters: `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`."""

Works = Callable[[int], torch.Tensor | Sequence[bool]]
"""Returns whether each worker makes an optimizer step, given the number of the step: slow ones make fewer."""


@dataclass
class Reuse:
    """Compiled code that consecutive simulations of the same model, loss and batch size share."""

    gradients: Gradients | None = None
    """Compiled and recorded code of the last simulation."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of one simulated training."""

    workers: int
    network: LossModel
    seed: int
    chunks: Chunks
    elements: int
    """Number of elements of the model, without padding."""
    device: torch.device
    loss: Loss
    clip: float | None
    wire: torch.dtype
    float32_per_chunk: int
    """Number of elements that a chunk would have in float32."""
    datagram_bytes: int
    at_once: int
    how: How
    precision: torch.dtype
    capture: bool
    fuse: bool
    deterministic: bool
    processes: Processes
    works: Works | None = None
    """Which workers make an optimizer step; None is all of them, always."""
    reuse: Reuse | None = None
    personal: frozenset[str] = frozenset()
    """Names of the personal parameters and buffers."""

    def works_at(self, step: int) -> torch.Tensor:
        """Returns whether each worker makes an optimizer step (W)."""
        if self.works is None:
            return torch.ones(self.workers, dtype=torch.bool)
        found = torch.as_tensor(self.works(step), dtype=torch.bool)
        if found.shape != (self.workers,):
            raise ValueError(f"works must return one flag for each of {self.workers} workers, got {found.shape}")
        return found

    def shared(self, model: nn.Module) -> list[nn.Parameter]:
        """Returns the trained parameters of a model that are exchanged."""
        return list(trained(model, self.personal)[0].values())

    def gradients(self, model: nn.Module, workers: int) -> Gradients:
        """Returns the gradient computation for this process's workers; reuses the last simulation's if it fits."""
        known = None if self.reuse is None else self.reuse.gradients
        fits = known is not None and known.at_once == min(self.at_once, workers)
        if known is not None and fits and known.begin_again(model, self.chunks, workers, self.personal):
            return known
        made = Gradients(
            model,
            self.loss,
            self.chunks,
            workers,
            min(self.at_once, workers),
            self.device,
            how=self.how,
            precision=self.precision,
            capture=self.capture,
            fuse=self.fuse,
            personal=self.personal,
        )
        if self.reuse is not None:
            self.reuse.gradients = made
        return made

    def with_at_once(self, at_once: int) -> Setting:
        """Returns the same setting with another number of workers at a time."""
        return replace(self, at_once=at_once)

    def for_trial(self) -> Setting:
        """Returns the same setting for one worker and a single step."""
        return replace(self, at_once=1, capture=False, fuse=False, reuse=None)

    def rounded(self, values: torch.Tensor, *, step: int, sender: int) -> torch.Tensor:
        """Returns values rounded to the wire's number format; the same tensor if that is float32. See `round_`."""
        if self.wire == torch.float32:
            return values
        found = values.clone()
        self.round_(found, step=step, sender=sender)
        return found

    def round_(self, values: torch.Tensor, *, step: int, sender: int) -> None:
        """Rounds values to the wire's number format, in place.

        Args:
            values: Values (C, E) of one sender, or (W, C, E) of several.
            step: Number of the step, and
            sender: first sending worker, or the number of workers if owners send: both choose grids.
        """
        if self.wire in GRIDS:
            round_to_grids_(values, GRIDS[self.wire], seed=(self.seed, step), sender=sender)
        elif self.wire != torch.float32:
            values.copy_(values.to(self.wire))

    @property
    def compression_ratio(self) -> float:
        """Bytes of float32 divided by those of the wire, for as many elements."""
        return self.chunks.per_chunk / self.float32_per_chunk
