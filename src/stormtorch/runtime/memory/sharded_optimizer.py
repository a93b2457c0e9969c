"""Sharded optimizer (ZeRO): runs the user's optimizer on this rank's shard, and converts state from and to torch's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stormtorch.collectives import Group
from stormtorch.collectives.base import objects
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import Piece
from stormtorch.runtime.memory.shard_state import ShardState, State
from stormtorch.runtime.memory.sharded_optimizer_state import ShardedOptimizerState

MASTER = "master"
"""Key in the optimizer's state of the float32 master values of a bfloat16 or float16 parameter."""
_BY_ELEMENTS = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
    torch.optim.Rprop,
)


def owns_whole(optimizer: torch.optim.Optimizer, ownership: str) -> bool:
    """Whether shards must not split parameters.

    Raises:
        ValueError: The optimizer cannot work on shards at all.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the model in the middle of a step, when no rank has all parameters: use another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam needs sparse gradients, which are not supported: use Adam, and Embedding(sparse=False)"
        )
    if ownership != "auto":
        return ownership == "parameters"
    return type(optimizer) not in _BY_ELEMENTS


class ShardedOptimizer:
    """The pieces of parameters that this rank's optimizer updates. Each piece is a local parameter of the optimizer.

    Args:
        optimizer: The user's optimizer. Its parameter groups now hold local parameters.
        parameters: All of its parameters, by number, in the order of its groups.
        buckets: Buckets that hold the trained parameters.
        whole: Whether pieces are whole parameters, with their shape.
        personal: The personal parameters among them, which stay in their groups unchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        *,
        whole: bool,
        personal: Sequence[nn.Parameter] = (),
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._buckets = buckets
        self._whole = whole
        self.pieces: list[tuple[Bucket, Piece, nn.Parameter]] = []
        # GradScaler checks whether all gradients are finite. A rank with an empty shard must skip the same steps: it
        # finds the result in this parameter's gradient, which no step ever uses.
        self._finite_probe = nn.Parameter(torch.zeros(1, 1, device=buckets[0].device))
        self._stepping = False
        self._versions: list[int] = []
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self.groups = [[numbers[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        """Numbers of the parameters in each of the optimizer's groups."""
        self._personal = {numbers[id(each)]: each for each in personal}
        sliced = {slot.parameter for bucket in buckets for slot in bucket.layout.slots}
        self._split_numbers = {id(each): number for number, each in enumerate(parameters) if number in sliced}
        before = dict(optimizer.state)

        def state_at_start(piece: Piece) -> State:
            return self._slice_loaded(before.get(parameters[piece.parameter], {}), piece)

        self.state_at_start: Callable[[Piece], State] = state_at_start
        """Returns the optimizer's state of any rank's piece, as it was before `prepare`."""
        self.repartition(lambda _bucket, piece: state_at_start(piece))
        found = weakref.ref(self)

        def loaded(_optimizer: torch.optim.Optimizer) -> None:
            shards = found()
            if shards is not None:
                shards.guard_state()

        optimizer.register_load_state_dict_post_hook(loaded)

    def repartition(self, state_of: Callable[[int, Piece], State]) -> None:
        """Makes the optimizer work on the current pieces of this rank's buckets.

        Args:
            state_of: Returns the optimizer's state of a piece, given its bucket.
        """
        self.pieces = [
            (bucket, piece, self._local_param(bucket, piece)) for bucket in self._buckets for piece in bucket.pieces()
        ]
        by_parameter: dict[int, list[nn.Parameter]] = {number: [each] for number, each in self._personal.items()}
        state: dict[torch.Tensor, State] = {}
        for bucket, piece, local_param in self.pieces:
            by_parameter.setdefault(piece.parameter, []).append(local_param)
            given = state_of(bucket.index, piece)
            if given:
                state[local_param] = dict(given)
        kept: dict[Any, Any] = dict(self._optimizer.state)
        own = {id(each) for each in self._personal.values()}
        for key in kept:
            if isinstance(key, torch.Tensor) and id(key) not in own:
                del self._optimizer.state[key]  # entries whose key is no parameter stay
        self.guard_state()
        self._optimizer.state.update(state)
        for group, members in zip(self._optimizer.param_groups, self.groups, strict=True):
            group["params"] = [local_param for number in members for local_param in by_parameter.get(number, [])]
        self._optimizer.param_groups[0]["params"].append(self._finite_probe)

    def guard_state(self) -> None:
        """Makes `optimizer.state` a `ShardedOptimizerState`, because programs index it by the model's parameters."""
        if not isinstance(self._optimizer.state, ShardedOptimizerState):
            states = ShardedOptimizerState(self._split_numbers, self._local_params_of)
            states.update(self._optimizer.state)
            self._optimizer.state = states

    def _local_params_of(self, number: int) -> list[tuple[nn.Parameter, Callable[[State], State]]]:
        def slicer_for(piece: Piece) -> Callable[[State], State]:
            return lambda state: self._slice_loaded(dict(state), piece)

        return [(each, slicer_for(piece)) for _, piece, each in self.pieces if piece.parameter == number]

    def _local_param(self, bucket: Bucket, piece: Piece) -> nn.Parameter:
        values = bucket.within_own(piece, bucket.masters)
        return nn.Parameter(values.view(self._parameters[piece.parameter].shape) if self._whole else values)

    @contextlib.contextmanager
    def without_personal(self) -> Iterator[None]:
        """Enters a context in which the optimizer has only this rank's pieces and no personal parameters."""
        own = {id(each) for each in self._personal.values()}
        groups = list(self._optimizer.param_groups) if own else []
        all_of = [group["params"] for group in groups]
        for group, params in zip(groups, all_of, strict=True):
            group["params"] = [each for each in params if id(each) not in own]
        try:
            yield
        finally:
            for group, params in zip(groups, all_of, strict=True):
                group["params"] = params

    def rebind_memory(self) -> None:
        """Makes local parameters share the current memory of their buckets' masters."""
        for bucket, piece, local_param in self.pieces:
            local_param.data = bucket.within_own(piece, bucket.masters).view(local_param.shape)

    def shard_state(self) -> ShardState:
        """Returns the state of this rank's shard. It stays valid until the optimizer's next step."""
        states = {
            (bucket.index, piece): dict(self._optimizer.state.get(local_param, {}))
            for bucket, piece, local_param in self.pieces
        }
        layouts = [bucket.layout for bucket in self._buckets]
        masters = [bucket.masters for bucket in self._buckets]
        return ShardState(self._buckets[0].rank, layouts, masters, lambda bucket, piece: states[bucket, piece])

    # --- gradients --------------------------------------------------------------------------------------------------

    def assign_gradients(self, used: Sequence[bool] | torch.Tensor, *, finite: bool) -> None:
        """Sets the gradient of every local parameter that any rank has used, and removes it from the others.

        Args:
            used: Whether each parameter was used on any rank.
            finite: Whether all ranks' gradients are finite. If not, every rank gets a NaN.
        """
        given: torch.Tensor | None = None
        for bucket, piece, local_param in self.pieces:
            if not bool(used[piece.parameter]):
                local_param.grad = None
                continue
            if local_param.grad is None:
                local_param.grad = bucket.within_own(piece, bucket.step_grads).view(local_param.shape)
            given = bucket.own_grads if finite else bucket.within_own(piece, bucket.own_grads)
        if given is None and not self._stepping:
            given = self._finite_probe.grad = torch.zeros_like(self._finite_probe)
        if given is not None and not finite:
            given.view(-1)[0] = torch.nan

    @torch.no_grad()
    def settle_gradients(self, before: Sequence[bool], used: Sequence[bool]) -> None:
        """Applies the program's changes to its gradients, and to those of local parameters.

        Args:
            before: Whether each parameter had a gradient when backward had ended.
            used: Whether it has one now.
        """
        for bucket, piece, local_param in self.pieces:
            if before[piece.parameter] and not used[piece.parameter]:
                local_param.grad = None
            elif used[piece.parameter] and not before[piece.parameter]:
                local_param.grad = bucket.within_own(piece, bucket.step_grads).view(local_param.shape)
            elif local_param.grad is not None and local_param.grad.data_ptr() != bucket.address_of(
                piece, bucket.step_grads
            ):
                home = bucket.within_own(piece, bucket.step_grads)
                home.copy_(local_param.grad.reshape(-1))
                local_param.grad = home.view(local_param.shape)

    def begin_step(self) -> None:
        """Called before the optimizer reads gradients."""
        self.guard_state()
        self._finite_probe.grad = None
        # Some optimizers read the gradient of every parameter, so hide the probe; but keep the first group non-empty.
        shown = self._optimizer.param_groups[0]["params"]
        if len(shown) > 1 and shown[-1] is self._finite_probe:
            shown.pop()
        self._stepping = True
        self._versions = self._now()

    @property
    def settled(self) -> bool:
        """Whether pieces have the values of the last complete step, also while a closure runs."""
        return not self._stepping or self._now() == self._versions

    def _now(self) -> list[int]:
        return [local_param._version for _, _, local_param in self.pieces]

    def end_step(self) -> None:
        """Called after the optimizer has stepped."""
        shown = self._optimizer.param_groups[0]["params"]
        if not shown or shown[-1] is not self._finite_probe:
            shown.append(self._finite_probe)
        self._stepping = False

    def clear_gradients(self) -> None:
        """Removes all gradients."""
        for _, _, local_param in self.pieces:
            local_param.grad = None
        self._finite_probe.grad = None

    # --- state in torch's format ------------------------------------------------------------------------------------

    def gather(self, local: dict[str, Any], group: Group) -> dict[str, Any]:
        """Gathers the state dict of the whole optimizer from the local one of every rank. All ranks must call it.

        For personal parameters it has this rank's own state.
        """
        order = self._order()
        own: list[tuple[int, int, int, dict[str, Any]]] = []
        for bucket, piece, local_param in self.pieces:
            state = dict(local["state"].get(order[id(local_param)], {}))
            if bucket.masters is not bucket.own:
                state[MASTER] = local_param.detach().clone()
            own.append((piece.parameter, piece.offset, piece.count, state))
        state_of: dict[int, dict[str, Any]] = {}
        for pieces in objects.gather(own, group):
            for number, offset, count, state in pieces:
                self._join(state_of.setdefault(number, {}), state, number, offset, count)
        state_of.update(self.personal_state(local))
        return {
            **local,
            "state": {number: state for number, state in sorted(state_of.items()) if state},
            "param_groups": [
                {**each, "params": members} for each, members in zip(local["param_groups"], self.groups, strict=True)
            ],
        }

    def personal_state(self, local: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Returns the state of each personal parameter that has any, by number, from this rank's local state dict."""
        order = self._order()
        found = {number: local["state"].get(order[id(each)]) for number, each in self._personal.items()}
        return {number: dict(state) for number, state in found.items() if state}

    def _order(self) -> dict[int, int]:
        """Returns the index of each parameter of the optimizer in its local state dict, by identity."""
        local_params = [local_param for each in self._optimizer.param_groups for local_param in each["params"]]
        return {id(local_param): index for index, local_param in enumerate(local_params)}

    def scatter(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a state dict of the whole optimizer, and loads its float32 master values."""
        groups = whole["param_groups"]
        if [len(each["params"]) for each in groups] != [len(members) for members in self.groups]:
            raise ValueError("the state dict has other parameter groups than the optimizer")
        number_of = {
            saved: number
            for each, members in zip(groups, self.groups, strict=True)
            for saved, number in zip(each["params"], members, strict=True)
        }
        saved_of = {number: saved for saved, number in number_of.items()}
        local: dict[int, dict[str, Any]] = {}
        params: list[list[int]] = [[] for _ in groups]
        at = {id(local_param): (position, piece) for position, (_, piece, local_param) in enumerate(self.pieces)}
        own = {id(each): number for number, each in self._personal.items()}
        index = 0
        for position, each in enumerate(self._optimizer.param_groups):
            for local_param in each["params"]:
                params[position].append(index)
                index += 1
                if local_param is self._finite_probe:
                    continue
                if id(local_param) in own:
                    given = whole["state"].get(saved_of[own[id(local_param)]])
                    if given:
                        local[index - 1] = given
                    continue
                _, piece = at[id(local_param)]
                state = self._slice_state(whole["state"].get(saved_of[piece.parameter], {}), piece)
                master = state.pop(MASTER, None)
                if master is not None:
                    with torch.no_grad():
                        local_param.copy_(master.view(local_param.shape))
                if state:
                    local[index - 1] = state
        return {
            **whole,
            "state": local,
            "param_groups": [{**each, "params": ids} for each, ids in zip(groups, params, strict=True)],
        }

    def state_slice(self, whole: dict[str, Any], piece: Piece) -> State:
        """Returns the part of a state dict of the whole optimizer that belongs to any rank's piece."""
        numbers = [number for members in self.groups for number in members]
        saved = [each for group in whole["param_groups"] for each in group["params"]]
        return self._slice_state(whole["state"].get(dict(zip(numbers, saved, strict=True))[piece.parameter], {}), piece)

    def _slice_state(self, state: dict[str, Any], piece: Piece) -> dict[str, Any]:
        """Returns a piece's part of a parameter's state. A value of another shape belongs to every piece."""
        shape = self._parameters[piece.parameter].shape
        sliced: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                sliced[name] = value
            elif self._whole or value.shape != shape or (value.dim() == 0 and name == "step"):
                sliced[name] = value.clone()
            else:
                sliced[name] = value.reshape(-1)[piece.offset : piece.offset + piece.count].clone()
        return sliced

    def _slice_loaded(self, state: State, piece: Piece) -> State:
        """Returns a piece's part of a state that the program has set or loaded.

        For bfloat16 and float16 parameters, state of the parameter's shape becomes float32, as if the optimizer had
        begun with the float32 masters. Otherwise its type is the optimizer's choice.
        """
        sliced, shape = (
            self._slice_state(state, piece),
            self._parameters[piece.parameter].shape if self._whole else (piece.count,),
        )
        if self._parameters[piece.parameter].dtype == torch.float32:
            return sliced
        return {
            name: value.float()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape
            else value
            for name, value in sliced.items()
        }

    def _join(self, into: dict[str, Any], state: dict[str, Any], number: int, offset: int, count: int) -> None:
        parameter = self._parameters[number]
        for name, value in state.items():
            if self._whole or not isinstance(value, torch.Tensor) or value.shape != (count,) or name == "step":
                into.setdefault(name, value)
                continue
            if name not in into:
                into[name] = torch.zeros(parameter.shape, dtype=value.dtype, device=value.device)
            into[name].view(-1)[offset : offset + count] = value
