# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Gradients of many workers, each on its own replica: all at once where torch can, or one after the other."""

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

from stormtorch.simulation.chunks import Cut
from stormtorch.simulation.processes import Together

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]
"""The scalar loss of a model on one worker's batch."""
How: TypeAlias = Literal["auto", "batched", "loop"]

# A relative difference between two ways to compute a loss, or a gradient, that rounding does not explain.
_TOLERANCE = 0.02


class Objective(nn.Module):
    """The loss as a module, so that its model's parameters can be replaced for one call."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        """One worker's."""
        found: Any = self._loss(self.model, batch)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(f"loss must give a tensor of one number for each worker's batch, got {what}")
        number: torch.Tensor = found.reshape(())
        return number


class Gradients:
    """Computes losses and gradients of a few replicas at a time.

    Args:
        model: A copy of it is the body that all replicas share.
        loss: Of one worker's batch.
        cut: Where parameters lie in a replica.
        workers: How many there are; each has buffers of its own.
        at_once: Replicas that are computed together.
        device: Where.
        how: "batched" computes them by `torch.func.vmap`, "loop" one by one. "auto" does the first on a GPU, if it
            works; a CPU's caches prefer one replica after the other.
        precision: What matrices are multiplied in; float32 computes as the model is.
        capture: On a GPU, whether the kernels are recorded once and replayed.
        fuse: Whether `torch.compile` fuses the kernels of "batched": minutes at first, then steps of half the time.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        cut: Cut,
        workers: int,
        at_once: int,
        device: torch.device,
        *,
        how: How = "auto",
        precision: torch.dtype = torch.float32,
        capture: bool = True,
        fuse: bool = False,
    ) -> None:
        self._body = Objective(copy.deepcopy(model).to(device).train(), loss)
        self._cut = cut
        self._device = device
        self._workers = workers
        self.how = "loop" if how == "auto" and device.type == "cpu" else how
        self._precision = precision
        self._capture = capture and device.type == "cuda"
        self._names = [name for name, each in self._body.named_parameters() if each.requires_grad]
        self._parameters = [each for each in self._body.parameters() if each.requires_grad]
        self.buffers = {
            name: each.detach().to(device).expand(workers, *each.shape).clone()
            for name, each in self._body.named_buffers()
        }
        """Of all workers, stacked, by name."""
        self.replicas = cut.empty(at_once, device=device)
        """Put replicas here before a call."""
        self.grads = cut.empty(at_once, device=device)
        """Find their gradients here after it."""
        self.used = torch.zeros(at_once, len(self._parameters), dtype=torch.bool)
        """And which parameters each loss depended on: the others have no gradient, not even one of zero."""
        self._worker = 0
        for place, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._noting(place))
        self._buffers = {name: each[:at_once].clone() for name, each in self.buffers.items()}
        self._stacked = torch.compile(self._losses_of, dynamic=False) if fuse else self._losses_of
        self._graph: Any = None
        self._batch: Any = None
        self._losses = torch.zeros(at_once, device=device)

    @property
    def at_once(self) -> int:
        """Replicas of a call."""
        return len(self.replicas)

    def compute(self, batch: Any, first: int, count: int) -> torch.Tensor:
        """Losses of the first `count` of `replicas`, which are the workers from `first` on; fills `grads`.

        Args:
            batch: Stacked: the first dimension of each tensor counts workers.
            first: Number of the first worker: whose buffers are used.
            count: How many.

        Raises:
            ValueError: The batch is not stacked so, or the loss is not a number.
        """
        for leaf in pytree.tree_leaves(batch):
            if not isinstance(leaf, torch.Tensor) or leaf.ndim < 1 or len(leaf) != count:
                what = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise ValueError(f"batches must be tensors with {count} workers in the first dimension, got {what}")
        for name, stacked in self.buffers.items():
            self._buffers[name][:count].copy_(stacked[first : first + count])
        # Contiguous, so that all steps look the same to what was compiled for the first.
        batch = pytree.tree_map(lambda each: each.to(self._device).contiguous(), batch)
        if self.how == "auto":
            with self._same_randomness():
                self.how = self._find_out(batch, count)
        recorded = self._capture and count == self.at_once and self._fits(batch)
        losses = self._replay(batch) if recorded else self._run(batch, count)
        for name, stacked in self.buffers.items():
            stacked[first : first + count].copy_(self._buffers[name][:count])
        return losses

    def begin_again(self, model: nn.Module, cut: Cut, workers: int) -> bool:
        """For another simulation of the same model: buffers and frozen parameters begin anew. False if it has others,
        or is cut in another way.
        """
        fresh = {f"model.{name}": each for name, each in model.named_buffers()}
        same_cut = (cut.shapes, cut.chunks, cut.per_chunk) == (self._cut.shapes, self._cut.chunks, self._cut.per_chunk)
        if self._workers != workers or fresh.keys() != self.buffers.keys() or not same_cut:
            return False
        for name, stacked in self.buffers.items():
            stacked.copy_(fresh[name].expand_as(stacked))
        with torch.no_grad():
            for own, given in zip(self._body.parameters(), model.parameters(), strict=True):
                if not own.requires_grad:
                    own.copy_(given)
        return True

    def average_buffers_into(self, model: nn.Module, together: Together) -> None:
        """A model gets the mean of all workers' floating-point buffers, and the first one's of the others."""
        workers = together.add_up(torch.tensor(float(self._workers)))
        for name, own in model.named_buffers():
            stacked = self.buffers[f"model.{name}"]
            if own.is_floating_point():
                own.copy_(together.add_up(stacked.sum(0)) / workers.to(own.device))
            else:
                own.copy_(stacked[0])

    def load_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        """From a checkpoint."""
        for name, stacked in self.buffers.items():
            stacked.copy_(buffers[name])

    def _same_randomness(self) -> AbstractContextManager[None]:
        """What is tried out draws nothing: dropout is the same with it and without, as where a training goes on."""
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
        # Leaves of their own: a gradient of the whole vector would be padded with zeros once for every parameter.
        leaves = [each.detach().requires_grad_() for each in self._cut.views(self.replicas[:count])]
        buffers = {name: each[:count] for name, each in self._buffers.items()}
        # Attention's fast kernels do not know of stacked replicas; its plain formula does.
        with self._autocast(), sdpa_kernel(SDPBackend.MATH):
            losses = self._stacked(leaves, buffers, batch)
        # A worker's loss depends on its own replica alone, so the gradient of the sum is everyone's own gradient.
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(losses.float().sum(), leaves, allow_unused=True)
        for own, grad in zip(self._cut.views(self.grads[:count]), found, strict=True):
            if grad is None:
                own.zero_()
            else:
                own.copy_(grad)
        self.used[:count] = torch.tensor([grad is not None for grad in found])
        return losses.detach().float()

    def _losses_of(self, leaves: list[torch.Tensor], buffers: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """(W): of stacked parameters, buffers and batches."""

        def one(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], own: Any) -> torch.Tensor:
            found: torch.Tensor = functional_call(self._body, {**parameters, **buffers}, (own,))
            return found

        given = dict(zip(self._names, leaves, strict=True))
        losses: torch.Tensor = torch.vmap(one, randomness="different")(given, buffers, batch)
        return losses

    def _loop(self, batch: Any, count: int) -> torch.Tensor:
        replicas, grads = self._cut.views(self.replicas), self._cut.views(self.grads)
        leaves, structure = pytree.tree_flatten(batch)
        losses = []
        self.used[:count] = False
        for worker in range(count):
            self._worker = worker
            self.grads[worker].zero_()
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

    def _noting(self, place: int) -> Callable[[torch.Tensor], None]:
        # Python does not see that parameters hold their hooks, so these must not hold the parameters.
        found = weakref.ref(self)

        def note(_parameter: torch.Tensor) -> None:
            gradients = found()
            if gradients is not None:
                gradients.used[gradients._worker, place] = True

        return note

    def _find_out(self, batch: Any, count: int) -> How:
        """Whether all at once works, and says the same as one by one."""
        before = {name: each.clone() for name, each in self._buffers.items()}

        def again(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            """The first worker's loss and gradient."""
            for name, each in before.items():
                self._buffers[name].copy_(each)
            return run()[0], self.grads[0].flatten().clone()

        found: How = "batched"
        alone = pytree.tree_map(lambda each: each[:1], batch)
        try:
            batched = again(lambda: self._batched(batch, count))
        except Exception as error:
            # Whatever it is: models do what they like, and one by one works for all of them.
            log = logger.warning if isinstance(error, torch.OutOfMemoryError) else logger.info
            log("workers are computed one by one: %s", error)
            found = "loop"
        else:
            one, other = again(lambda: self._loop(alone, 1)), again(lambda: self._loop(alone, 1))
            # The gradient as well: a model that keeps its parameters in a list of its own is right about the loss
            # only as long as those are what they were in the beginning.
            for what, *three in zip(("loss", "gradient"), batched, one, other, strict=True):
                ours, theirs, random = (float(torch.linalg.vector_norm(each)) for each in _differences(*three))
                if not ours <= _TOLERANCE * theirs + 10 * random + 1e-6:
                    logger.warning("workers are computed one by one: all at once, the %s is another", what)
                    found = "loop"
        for name, each in before.items():
            self._buffers[name].copy_(each)
        return found

    # --- on a GPU -----------------------------------------------------------------------------------------------------

    def _replay(self, batch: Any) -> torch.Tensor:
        """Thousands of small kernels, started by one call."""
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
        """Whether a batch has the shapes that were recorded."""
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
    """How far all at once is off, what it should be, and by how much that differs from time to time."""
    return batched - one, one, other - one
