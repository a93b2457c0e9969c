"""Arrival masks of virtual workers: which chunks arrive, exchange after exchange, under any loss model.

    masks = Masks(GilbertElliott(p=0.1, burst=8), workers=64, owner_C=owner_C, seed=1, device=torch.device("cuda"))
    up_WC = masks.up()      # the gradients: chunk c of worker w, on its way to the owner of c
    down_WC = masks.down()  # the parameters: chunk c on its way from its owner to worker w

As in the engine, each link (source, target) has its own state that continues from exchange to exchange, and every
exchange sends a message from another first chunk on, so that bursts begin anywhere. A worker's chunks to itself always
arrive. W workers, C chunks, S shards, B workers of a block.
"""

from typing import Any

import torch
from torch import Tensor

from stormtorch.network.loss import (
    LinkModel,
    LossModel,
    PerLink,
    Shared,
    SlowBackward,
    Stragglers,
    Trace,
    has_timed_bursts,
    in_time,
)
from stormtorch_lab.simulation.arrivals.loss_chains import Chains, ShardLayout, Traces, random_bits, threshold

__all__ = ["Masks"]

# Chunks to draw at a time: enough to keep the device busy, few enough for its cache or its memory.
_BLOCK_CPU, _BLOCK_CUDA = 1 << 19, 1 << 24


class Masks:
    """Draws which chunks arrive, exchange after exchange.

    Args:
        network: The loss model.
        workers: Number of workers, W.
        owner_C: Owner of each chunk, int64 and ascending. A worker may own nothing.
        seed: Random seed; the same seed gives the same masks on the same kind of device.
        device: Device of the masks.
    """

    def __init__(
        self, network: LossModel, workers: int, owner_C: Tensor, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.workers = workers
        self.device = torch.device(device)
        self._owner_C = self._checked_owners(owner_C).clone()
        if not bool((self._owner_C.diff() >= 0).all()):
            raise ValueError("owner_C must be ascending: a shard is a row of neighbouring chunks")
        self._shards = ShardLayout.of(self._owner_C)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._late = network if isinstance(network, Stragglers) else None
        self._slow = network if isinstance(network, SlowBackward) else None
        if self._slow is not None and isinstance(self._slow.part_s, tuple) and len(self._slow.part_s) != workers:
            raise ValueError(f"part_s must have one number for each of {workers} workers, got {self._slow.part_s}")
        self.deadline_s: float | None = None
        """Deadline in seconds of a `SlowBackward` in future exchanges; None has no deadline."""
        reached = in_time(network)
        if has_timed_bursts(reached):
            raise ValueError("network must have bursts of packets (GilbertElliott): virtual workers have no clock")
        self._chains, self._traces = self._links(reached)
        self._common_p = reached.common if isinstance(reached, Shared) else 0.0
        self._uplinks = self._common(reached) if isinstance(reached, Shared) else None
        chains = [each for each in (self._chains, self._uplinks) if each is not None]
        self._ordered = bool(self._late or self._traces or not all(each.independent for each in chains))
        self._row = ShardLayout.of(torch.zeros_like(self._owner_C))
        self._column = torch.zeros(1, dtype=torch.int64, device=self.device)
        block = _BLOCK_CPU if self.device.type == "cpu" else _BLOCK_CUDA
        self._block_rows = max(1, block // max(1, self._owner_C.numel()))

    @property
    def owner_C(self) -> Tensor:
        """Owner of each chunk, on the device."""
        return self._owner_C

    def up(self, owner_C: Tensor | None = None, sent_WC: Tensor | None = None) -> Tensor:
        """Draws stage 1, bool (W, C): whether chunk c of worker w has reached the owner of c.

        An `owner_C` given here holds for this exchange only: the same shards with other, distinct owners. `sent_WC`
        selects the chunks that are sent; values of the others are undefined.
        """
        return self._exchange(owner_C, True, sent_WC)

    def down(self, owner_C: Tensor | None = None, sent_WC: Tensor | None = None) -> Tensor:
        """Draws stage 2, bool (W, C): whether chunk c has reached worker w from its owner; see also `up`.

        All workers are sent the same chunks.
        """
        return self._exchange(owner_C, False, sent_WC)

    def retransmitted(self, missing_WC: Tensor, *, up: bool, owner_C: Tensor | None = None) -> Tensor:
        """Draws retransmissions of missing chunks on the same links; returns those that arrive.

        A retransmission has one receiver and no deadline, so losses are not shared and no rank is late.
        """
        expected = (self.workers, self._owner_C.numel())
        if missing_WC.dtype != torch.bool or tuple(missing_WC.shape) != expected:
            raise ValueError(f"missing_WC must be bool {expected}, got {missing_WC.dtype} {tuple(missing_WC.shape)}")
        return self._exchange(owner_C, up, missing_WC, retransmitted=True).logical_and_(missing_WC)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that later masks depend on."""
        state: dict[str, Any] = {"generator": self._generator.get_state()}
        if self._chains is not None:
            state["bad"] = self._chains.bad.clone()
        if self._uplinks is not None:
            state["uplinks_bad"] = self._uplinks.bad.clone()
        if self._traces is not None:
            state["next"] = self._traces.next.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the `state` of masks of the same network, workers, owners and kind of device."""
        mine = self.state_dict()
        if state.keys() != mine.keys() or any(state[key].shape != mine[key].shape for key in mine):
            raise ValueError("the state belongs to masks of another network, or of another number of workers")
        self._generator.set_state(state["generator"].cpu())
        if self._chains is not None:
            self._chains.bad.copy_(state["bad"])
        if self._uplinks is not None:
            self._uplinks.bad.copy_(state["uplinks_bad"])
        if self._traces is not None:
            self._traces.next.copy_(state["next"])

    def _common(self, network: Shared) -> Chains:
        """Makes the chains of each worker's uplink, as a matrix of one column."""
        p = torch.full((self.workers, 1), network.common, dtype=torch.float64, device=self.device)
        return Chains(p, torch.full_like(p, network.burst), self._generator)

    def _links(self, network: LinkModel | PerLink | Shared) -> tuple[Chains | None, Traces | None]:
        """Makes the chains and traces of links (source, target). Independent loss is a chain without memory."""
        shape = (self.workers, self.workers)
        default = network.default if isinstance(network, PerLink) else network
        p, burst = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        which = torch.full(shape, -1)
        traces: dict[Trace, int] = {}
        if isinstance(default, Trace):
            which.fill_(traces.setdefault(default, 0))
        elif isinstance(default, Shared):
            p.fill_(default.own)
            burst.fill_(default.burst)
        else:
            p.fill_(default.link_faults().loss)
            burst.fill_(default.link_faults().burst)
        if isinstance(network, PerLink):
            # Collect lists first: there may be a million links, and writing single elements of a tensor is slow.
            at, rows = [], []
            for (source, target), model in network.links.items():
                if max(source, target) >= self.workers:
                    raise ValueError(f"network names the link {source, target}; there are {self.workers} workers")
                at.append(source * self.workers + target)
                trace = traces.setdefault(model, len(traces)) if isinstance(model, Trace) else -1
                rows.append((trace, *model.link_faults()[:2]))
            for each, values in zip((which, p, burst), zip(*rows, strict=True), strict=False):
                each.view(-1)[at] = torch.tensor(values, dtype=each.dtype)
        for each in (which, p, burst):
            # The diagonal is not used. A real link's value there keeps all links equal.
            each.fill_diagonal_(each.flatten()[-2:].tolist()[0])
        chains = None if bool((which >= 0).all()) else Chains(p.to(self.device), burst.to(self.device), self._generator)
        replay = Traces(list(traces), which.to(self.device), self._generator) if bool((which >= 0).any()) else None
        return chains, replay

    def _exchange(
        self, owner_C: Tensor | None, up: bool, sent_WC: Tensor | None, *, retransmitted: bool = False
    ) -> Tensor:
        owner_C = self._owner_C if owner_C is None else self._checked_owners(owner_C)
        shards, chunks = self._shards, owner_C.numel()
        if chunks != self._owner_C.numel():
            raise ValueError(f"owner_C must have {self._owner_C.numel()} entries, as the constructor's, got {chunks}")
        owner_S = owner_C[shards.first_S]
        if owner_C is not self._owner_C:
            self._check_relabelled(owner_C, owner_S)
        position_C = chunk_at_C = None
        if self._ordered:
            turn = torch.rand((), dtype=torch.float64, device=self.device, generator=self._generator)
            rotation_S = (turn * shards.size_S).long()
            chunk_at_C, position_C = shards.rotated(rotation_S), shards.rotated(rotation_S, back=True)
        arrived_WC = torch.empty(self.workers, chunks, dtype=torch.bool, device=self.device)
        for begin in range(0, self.workers, self._block_rows):
            rows = slice(begin, min(begin + self._block_rows, self.workers))
            into_BC = arrived_WC[rows]
            if not self._ordered and self._chains is not None and self._chains.only_p is not None:
                bits_BC = random_bits(tuple(into_BC.shape), self._generator)
                torch.ge(bits_BC, threshold(self._chains.only_p), out=into_BC)
            else:
                sent_BC = _in_order(sent_WC, rows, chunk_at_C)
                into_BC.copy_(_by_chunk(self._lost(rows, owner_S, up, sent_BC), position_C).logical_not_())
            if self._uplinks is not None:
                if retransmitted:
                    into_BC &= random_bits(tuple(into_BC.shape), self._generator) >= threshold(self._common_p)
                elif up:
                    sent_BC = _in_order(sent_WC, rows, chunk_at_C)
                    out_BC = self._uplinks.lost(rows, self._column, self._row, up=True, sent_BC=sent_BC)
                    into_BC &= _by_chunk(out_BC, position_C).logical_not_()
        if not retransmitted:
            if self._uplinks is not None and not up:
                sent_1C = _in_order(sent_WC, slice(0, 1), chunk_at_C)
                out_1C = self._uplinks.lost(slice(0, 1), owner_S, shards, up=False, sent_BC=sent_1C)
                arrived_WC &= _by_chunk(out_1C, position_C).logical_not_()
            if self._late is not None and position_C is not None and not self._late.backwards:
                self._truncate_late(self._late, arrived_WC, position_C, owner_S, up)
        arrived_WC[owner_C, torch.arange(chunks, device=self.device)] = True
        if self._late is not None and self._late.backwards and up and not retransmitted:
            self._truncate_backward(self._late, arrived_WC)
        if self._slow is not None and self.deadline_s is not None and up and not retransmitted:
            self._truncate_slow(self._slow, self.deadline_s, arrived_WC)
        return arrived_WC

    def _truncate_backward(self, late: Stragglers, arrived_WC: Tensor) -> None:
        """Marks gradients that late workers have not computed by the deadline as lost, also for themselves."""
        late_W = random_bits((self.workers,), self._generator) < threshold(late.chance)
        part_W = torch.rand(self.workers, device=self.device, generator=self._generator)
        if late.delivered is not None:
            part_W.fill_(late.delivered)
        first_W = torch.where(late_W, (1.0 - part_W) * arrived_WC.shape[1], 0.0)
        arrived_WC &= torch.arange(arrived_WC.shape[1], device=self.device) >= first_W.unsqueeze(-1)

    def _truncate_slow(self, slow: SlowBackward, deadline_s: float, arrived_WC: Tensor) -> None:
        """Marks gradients as lost that workers have not computed by the deadline."""
        part_s = torch.tensor(slow.part_s, dtype=torch.float64, device=self.device)
        done_W = torch.poisson((deadline_s / part_s).expand(self.workers), generator=self._generator)
        part_C = torch.arange(arrived_WC.shape[1], device=self.device) * slow.parts // arrived_WC.shape[1]
        arrived_WC &= slow.parts - part_C <= done_W.unsqueeze(-1)

    def _truncate_late(
        self, late: Stragglers, arrived_WC: Tensor, position_C: Tensor, owner_S: Tensor, up: bool
    ) -> None:
        """Marks the last chunks of late senders as lost."""
        shards = self._shards
        is_late_W = random_bits((self.workers,), self._generator) < threshold(late.chance)
        drawn_2W = torch.rand(2, self.workers, device=self.device, generator=self._generator)
        part_W = drawn_2W[0] if late.delivered is None else torch.full_like(drawn_2W[0], late.delivered)
        # Rounded up or down at random, so that short messages too keep that part on average.
        in_time_WS = (part_W[:, None] * shards.size_S + drawn_2W[1][:, None]).long()
        in_time_WS = torch.where(is_late_W[:, None], in_time_WS, shards.size_S)
        nth_C = position_C - shards.first_S[shards.shard_C]
        if not up:
            in_time_S = in_time_WS[owner_S, torch.arange(owner_S.numel(), device=self.device)]
            arrived_WC &= nth_C < in_time_S[shards.shard_C]
            return
        for worker in is_late_W.nonzero().flatten().tolist():
            arrived_WC[worker] &= nth_C < in_time_WS[worker, shards.shard_C]

    def _lost(self, rows: slice, owner_S: Tensor, up: bool, sent_BC: Tensor | None) -> Tensor:
        """Returns which chunks are lost, (B, C) in the order of sending."""
        if self._traces is None:
            assert self._chains is not None
            return self._chains.lost(rows, owner_S, self._shards, up=up, sent_BC=sent_BC)
        replayed_BC = self._traces.lost(rows, owner_S, self._shards, up=up, sent_BC=sent_BC)
        if self._chains is None:
            return replayed_BC
        drawn_BC = self._chains.lost(rows, owner_S, self._shards, up=up, sent_BC=sent_BC)
        here = self._traces.here if up else self._traces.here.t()
        here_BC = here[rows].index_select(1, owner_S).index_select(1, self._shards.shard_C)
        return torch.where(here_BC, replayed_BC, drawn_BC)

    def _checked_owners(self, owner_C: Tensor) -> Tensor:
        if owner_C.ndim != 1 or owner_C.numel() == 0 or owner_C.dtype != torch.int64:
            raise ValueError(f"owner_C must be int64 with one entry per chunk, got {owner_C.dtype} {owner_C.shape}")
        if not bool(((owner_C >= 0) & (owner_C < self.workers)).all()):
            raise ValueError(f"owner_C must name workers in 0 to {self.workers - 1}")
        return owner_C.to(self.device)

    def _check_relabelled(self, owner_C: Tensor, owner_S: Tensor) -> None:
        same = bool((owner_S[self._shards.shard_C] == owner_C).all())
        if not same or bool((owner_S.bincount() > 1).any()):
            raise ValueError("owner_C must give the shards of the constructor other owners, each its own")


def _in_order(sent_WC: Tensor | None, rows: slice, chunk_at_C: Tensor | None) -> Tensor | None:
    """Returns which chunks of a block of workers are sent, in the order of sending; None sends all."""
    if sent_WC is None:
        return None
    return sent_WC[rows] if chunk_at_C is None else sent_WC[rows].index_select(1, chunk_at_C)


def _by_chunk(sent_BC: Tensor, position_C: Tensor | None) -> Tensor:
    """Reorders from the order of sending to that of chunks; without `position_C` they are the same."""
    return sent_BC if position_C is None else sent_BC.index_select(1, position_C)
