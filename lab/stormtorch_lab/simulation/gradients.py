# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Computes the gradients of many workers, each on its own replica: batched where torch can, or one after the other."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from stormtorch_lab.simulation.parameters.chunks import Chunks
from stormtorch_lab.simulation.parameters.personal import Personal
from stormtorch_lab.simulation.processes import Processes

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]
"""Computes the scalar loss of a model on one worker's batch."""
How: TypeAlias = Literal["auto", "batched", "loop"]

# Rounding does not explain a larger relative difference between two ways to compute a loss or a gradient.
_TOLERANCE = 0.02


def trained(model: nn.Module, personal: frozenset[str]) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Returns the trained parameters by name: the exchanged and the personal ones."""
    found = {name: each for name, each in model.named_parameters() if each.requires_grad}
    shared = {name: each for name, each in found.items() if name not in personal}
    return shared, {name: each for name, each in found.items() if name in personal}


class Objective(nn.Module):
    """The loss as a module, so that the parameters of its model can be replaced for one call."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        """Computes the loss of one worker's batch."""
        found: Any = self._loss(self.model, batch)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(f"loss must give a tensor of one number for each worker's batch, got {what}")
        number: torch.Tensor = found.reshape(())
        return number


class Gradients:
    """Computes losses and gradients of a few replicas at a time.

    Args:
        model: The model; all replicas share a copy of it, with their own parameters.
        loss: Computes the loss of one worker's batch.
        chunks: Layout of parameters in a replica.
        workers: Number of workers of this process; each has its own buffers and personal parameters.
        at_once: Number of replicas that one call computes.
        device: Device of the replicas.
        how: "batched" computes replicas at once by `torch.func.vmap`, "loop" one by one. "auto" is "batched" on a GPU,
            if that works, and "loop" on a CPU, whose caches prefer it.
        precision: Number format in which matrices are multiplied; float32 leaves it to the model.
        capture: Whether to record the kernels once and replay them, on a GPU.
        fuse: Whether `torch.compile` fuses the kernels of "batched": takes minutes at first, then halves a step's time.
        personal: Names of the model's personal parameters and buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        chunks: Chunks,
        workers: int,
        at_once: int,
        device: torch.device,
        *,
        how: How = "auto",
        precision: torch.dtype = torch.float32,
        capture: bool = True,
        fuse: bool = False,
        personal: frozenset[str] = frozenset(),
    ) -> None:
        self._body = Objective(copy.deepcopy(model).to(device).train(), loss)
        self._chunks = chunks
        self._device = device
        self._workers = workers
        self.how = "loop" if how == "auto" and device.type == "cpu" else how
        self._precision = precision
        self._capture = capture and device.type == "cuda"
        self._personal_names = personal
        shared, own = trained(model, personal)
        # In the order of the vectors: first exchanged, then personal parameters.
        self._names = [f"model.{name}" for name in (*shared, *own)]
        self._parameters = [self._body.get_parameter(name) for name in self._names]
        self.personal = Personal(list(own.values()), workers, device)
        """Personal parameters of all workers, and their gradients after `compute`."""
        self._own, self._own_grads = (self.personal.chunks.empty(at_once, device=device) for _ in range(2))
        self.buffers = {
            name: each.detach().to(device).expand(workers, *each.shape).clone()
            for name, each in self._body.named_buffers()
        }
        """Buffers of all workers, stacked, by name."""
        self.replicas = chunks.empty(at_once, device=device)
        """Replicas; the caller writes them before `compute`."""
        self.grads = chunks.empty(at_once, device=device)
        """Gradients of the replicas, after `compute`."""
        self._used = torch.zeros(at_once, len(self._parameters), dtype=torch.bool)
        self._worker = 0
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._recording_use(index))
        self._buffers = {name: each[:at_once].clone() for name, each in self.buffers.items()}
        self._stacked = torch.compile(self._losses_of, dynamic=False) if fuse else self._losses_of
        self._graph: Any = None
        self._batch: Any = None
        self._losses = torch.zeros(at_once, device=device)

    @property
    def at_once(self) -> int:
        """Number of replicas that one call computes."""
        return len(self.replicas)

    @property
    def used(self) -> torch.Tensor:
        """Whether each loss depended on each exchanged parameter; otherwise it has no gradient, not even zero."""
        return self._used[:, : len(self._chunks.shapes)]

    def compute(self, batch: Any, first: int, count: int) -> torch.Tensor:
        """Returns the losses of the first `count` of `replicas`, and writes their gradients to `grads`.

        Args:
            batch: Stacked batches: the first dimension of each tensor counts workers.
            first: Number of the worker that the first replica belongs to, whose buffers it uses.
            count: Number of replicas.

        Raises:
            ValueError: The batch is not stacked, or the loss is not a tensor of one number.
        """
        for leaf in pytree.tree_leaves(batch):
            if not isinstance(leaf, torch.Tensor) or leaf.ndim < 1 or len(leaf) != count:
                what = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise ValueError(f"batches must be tensors with {count} workers in the first dimension, got {what}")
        for name, stacked in self.buffers.items():
            self._buffers[name][:count].copy_(stacked[first : first + count])
        self._own[:count].copy_(self.personal.values[first : first + count])
        # Contiguous, so that code compiled for the first step fits all others.
        batch = pytree.tree_map(lambda each: each.to(self._device).contiguous(), batch)
        if self.how == "auto":
            with self._same_randomness():
                self.how = self._find_out(batch, count)
        recorded = self._capture and count == self.at_once and self._fits(batch)
        losses = self._replay(batch) if recorded else self._run(batch, count)
        for name, stacked in self.buffers.items():
            stacked[first : first + count].copy_(self._buffers[name][:count])
        self.personal.grads[first : first + count].copy_(self._own_grads[:count])
        self.personal.used[first : first + count] = self._used[:count, len(self._chunks.shapes) :]
        return losses

    def begin_again(self, model: nn.Module, chunks: Chunks, workers: int, personal: frozenset[str]) -> bool:
        """Resets buffers, personal and frozen parameters for another simulation of the same model.

        Returns False if the simulation has other buffers, chunks or personal parts, or another number of workers.
        """
        fresh = {f"model.{name}": each for name, each in model.named_buffers()}
        known = self._chunks
        same = (chunks.shapes, chunks.count, chunks.per_chunk) == (known.shapes, known.count, known.per_chunk)
        same = same and personal == self._personal_names
        if self._workers != workers or fresh.keys() != self.buffers.keys() or not same:
            return False
        self.personal.begin(list(trained(model, personal)[1].values()))
        for name, stacked in self.buffers.items():
            stacked.copy_(fresh[name].expand_as(stacked))
        with torch.no_grad():
            for own, given in zip(self._body.parameters(), model.parameters(), strict=True):
                if not own.requires_grad:
                    own.copy_(given)
        return True

    def average_buffers_into(self, model: nn.Module, processes: Processes) -> None:
        """Gives a model the mean of all workers' floating-point buffers, and the first worker's other buffers."""
        workers = processes.all_reduce(torch.tensor(float(self._workers)))
        for name, own in model.named_buffers():
            stacked = self.buffers[f"model.{name}"]
            if own.is_floating_point():
                own.copy_(processes.all_reduce(stacked.sum(0)) / workers.to(own.device))
            else:
                own.copy_(stacked[0])

    def give_personal_to(self, model: nn.Module, worker: int) -> None:
        """Gives a model the personal parameters and buffers of one of this process's workers."""
        parameters = trained(model, self._personal_names)[1].values()
        for parameter, own in zip(parameters, self.personal.chunks.views(self.personal.values[worker]), strict=True):
            parameter.data.copy_(own)
        for name, buffer in model.named_buffers():
            if name in self._personal_names:
                buffer.copy_(self.buffers[f"model.{name}"][worker])

    def load_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        """Loads the workers' buffers from a checkpoint."""
        for name, stacked in self.buffers.items():
            stacked.copy_(buffers[name])

    def _same_randomness(self) -> AbstractContextManager[None]:
        """Returns a context that restores random generators: a trial must not change what dropout draws later."""
        found: AbstractContextManager[None] = torch.random.fork_rng(
            [self._device] if self._device.type == "cuda" else []
        )
        return found

    def _run(self, batch: Any, count: int) -> torch.Tensor:
        return self._batched(batch, count) if self.how == "batched" else self._loop(batch, count)

    def _autocast(self) -> torch.autocast:
        lower = self._precision != torch.float32
        return torch.autocast(self._device.type, self._precision, enabled=lower, cache_enabled=False)

    def _batched(self, batch: Any, count: int) -> torch.Tensor:
        # Each parameter is a leaf: a gradient of the whole vector would be padded with zeros once per parameter.
        leaves = [each.detach().requires_grad_() for each in self._views(self.replicas[:count], self._own[:count])]
        buffers = {name: each[:count] for name, each in self._buffers.items()}
        # Attention's fast kernels do not support stacked replicas; its plain formula does.
        with self._autocast(), sdpa_kernel(SDPBackend.MATH):
            losses = self._stacked(leaves, buffers, batch)
        # A worker's loss depends only on its own replica, so the gradient of the sum gives each worker its own.
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(losses.float().sum(), leaves, allow_unused=True)
        for own, grad in zip(self._views(self.grads[:count], self._own_grads[:count]), found, strict=True):
            if grad is None:
                own.zero_()
            else:
                own.copy_(grad)
        self._used[:count] = torch.tensor([grad is not None for grad in found])
        return losses.detach().float()

    def _losses_of(self, leaves: list[torch.Tensor], buffers: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """Returns the losses (W) of stacked parameters, buffers and batches."""

        def one(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], own: Any) -> torch.Tensor:
            found: torch.Tensor = functional_call(self._body, {**parameters, **buffers}, (own,))
            return found

        given = dict(zip(self._names, leaves, strict=True))
        losses: torch.Tensor = torch.vmap(one, randomness="different")(given, buffers, batch)
        return losses

    def _loop(self, batch: Any, count: int) -> torch.Tensor:
        replicas, grads = self._views(self.replicas, self._own), self._views(self.grads, self._own_grads)
        leaves, structure = pytree.tree_flatten(batch)
        losses = []
        self._used[:count] = False
        for worker in range(count):
            self._worker = worker
            self.grads[worker].zero_()
            self._own_grads[worker].zero_()
            for parameter, own, grad in zip(self._parameters, replicas, grads, strict=True):
                parameter.data, parameter.grad = own[worker], grad[worker]
            for name, buffer in self._body.named_buffers():
                buffer.data = self._buffers[name][worker]
            with self._autocast():
                own_batch = pytree.tree_unflatten([leaf[worker] for leaf in leaves], structure)
                loss = self._body(own_batch).float()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def _views(self, shared: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of all trained parameters: exchanged and personal."""
        return self._chunks.views(shared) + self.personal.chunks.views(own)

    def _recording_use(self, index: int) -> Callable[[torch.Tensor], None]:
        # Python's garbage collector does not see that parameters hold their hooks, so hooks must not hold parameters.
        found = weakref.ref(self)

        def note(_parameter: torch.Tensor) -> None:
            gradients = found()
            if gradients is not None:
                gradients._used[gradients._worker, index] = True

        return note

    def _find_out(self, batch: Any, count: int) -> How:
        """Tests whether "batched" works and gives the same results as "loop"."""
        before = {name: each.clone() for name, each in self._buffers.items()}

        def again(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            """Returns the first worker's loss and gradient, with the buffers of the beginning."""
            for name, each in before.items():
                self._buffers[name].copy_(each)
            return run()[0], torch.cat([self.grads[0].flatten(), self._own_grads[0].flatten()])

        found: How = "batched"
        alone = pytree.tree_map(lambda each: each[:1], batch)
        try:
            batched = again(lambda: self._batched(batch, count))
        except Exception as error:
            # Any error: models may do anything, and one by one works for all of them.
            log = logger.warning if isinstance(error, torch.OutOfMemoryError) else logger.info
            log("workers are computed one by one: %s", error)
            found = "loop"
        else:
            one, other = again(lambda: self._loop(alone, 1)), again(lambda: self._loop(alone, 1))
            # Compare gradients too: a model that keeps its parameters in a list of its own has the right loss, but only
            # as long as they have their first values.
            for what, *three in zip(("loss", "gradient"), batched, one, other, strict=True):
                ours, theirs, random = (float(torch.linalg.vector_norm(each)) for each in _differences(*three))
                if not ours <= _TOLERANCE * theirs + 10 * random + 1e-6:
                    logger.warning("workers are computed one by one: computed all at once, the %s differs", what)
                    found = "loop"
        for name, each in before.items():
            self._buffers[name].copy_(each)
        return found

    # --- on a GPU -----------------------------------------------------------------------------------------------------

    def _replay(self, batch: Any) -> torch.Tensor:
        """Computes by replaying recorded kernels: one call starts thousands of small ones."""
        if self._graph is None:
            self._batch = pytree.tree_map(lambda each: each.clone(), batch)
            before = {name: each.clone() for name, each in self._buffers.items()}
            try:
                with self._same_randomness():
                    self._record()
            except RuntimeError as error:
                logger.warning("the GPU's kernels cannot be recorded, so steps take longer: %s", error)
                self._capture, self._graph = False, None
                torch.cuda.synchronize()
                return self._run(batch, self.at_once)
            for name, each in before.items():
                self._buffers[name].copy_(each)
        for own, given in zip(pytree.tree_leaves(self._batch), pytree.tree_leaves(batch), strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._losses.clone()

    def _fits(self, batch: Any) -> bool:
        """Whether a batch has the shapes that were recorded, if any were."""
        known, given = pytree.tree_leaves(self._batch), pytree.tree_leaves(batch)
        return self._graph is None or [each.shape for each in known] == [each.shape for each in given]

    def _record(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run(self._batch, self.at_once)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._losses = self._run(self._batch, self.at_once)
        self._graph = graph


def _differences(batched: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the error of "batched", the value of "loop", and the difference between two values of "loop"."""
    return batched - one, one, other - one
