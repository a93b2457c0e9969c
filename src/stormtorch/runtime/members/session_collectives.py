"""Elastic all-reduce and all-gather of small values over the current members: they survive failures, joins and leaves.

A call has two exchanges. In the first, each rank sends its value; in the second, it reports whose values it received.
A value counts if all remaining ranks have it, so all of them get the same result. A rank that dies does not raise an
error: what it had not sent is missing. The sequence of calls continues across views, because one rank may be in a call
before a view begins that another rank enters afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.collectives.base.objects import pack, unpack
from stormtorch.errors import StormError
from stormtorch.exchange.waiting import in_call
from stormtorch.runtime.members.membership import SessionMembership, View

Value = TypeVar("Value", float, torch.Tensor)
_MOST_BYTES = 64 << 20


def ranks_counted(
    members: Sequence[int], here: Collection[int], known: Mapping[int, Collection[int]], known_gone: Collection[int]
) -> tuple[set[int], list[int]]:
    """Returns the ranks whose values count, and the dead ranks that make the result ambiguous.

    A rank that dies may have sent its value to some ranks only. Ranks that miss it report so, and all ranks then leave
    it out. If a reporting rank dies too, its report may have reached some ranks only, so that ranks could count
    different values. In all other cases all ranks count the same values.

    Args:
        members: Ranks that take part.
        here: Ranks whose values this rank has.
        known: For each rank that has reported, the ranks whose values it has.
        known_gone: Ranks that cannot have reported to any rank, because all ranks knew that they were gone.
    """
    count = {rank for rank in here if all(rank in each for each in known.values())}
    silent = [rank for rank in members if rank not in known]
    unsure = any(other != rank and other not in known_gone for rank in count.intersection(silent) for other in silent)
    return count, silent if unsure else []


class SessionCollectives:
    """Collectives of a session's members outside its steps: `mean`, `sum`, `gather`. A base of `Session`."""

    name: str
    group: Group
    membership: SessionMembership
    steps: int
    _new: tuple[int, set[int]] = (-1, set())
    """Steps at which the view began, and the ranks that joined with it."""
    _sequence = 0
    """Number of the sequence of calls: that of the last view that admitted a rank."""
    _next_sequence: tuple[int, int] | None = None
    """Steps after which the next sequence begins, and its number."""

    def mean(self, value: Value) -> Value:
        """Returns the mean of a number or tensor over the current members, the same on all of them.

        All ranks call it, at the same step. It continues when a rank dies, where `dist.all_reduce` would end the job. A
        rank that joined the running job takes part from its first step on, and gets its own value before that.

        Args:
            value: A number, or a tensor of the same shape and dtype on all ranks. It is not changed.
        """
        result: Value = self._reduce_over_members(value, "session.mean()", mean=True)
        return result

    def sum(self, value: Value) -> Value:
        """Returns the sum over the current members, as `mean` does."""
        result: Value = self._reduce_over_members(value, "session.sum()", mean=False)
        return result

    def gather(self, value: object) -> dict[int, Any]:
        """Returns the value of each current member, by rank, as `mean` does.

        Args:
            value: Numbers, strings, lists, dictionaries and tensors, of any size up to 64 MiB. They may differ between
                ranks.
        """
        message = pack(value)
        if message.numel() > _MOST_BYTES:
            raise ValueError(f"value must have at most {_MOST_BYTES >> 20} MiB, got {message.numel() >> 20}")
        reported = self._gather_all(
            torch.tensor([message.numel()], dtype=torch.int64, device="cpu"), "session.gather()"
        )
        sizes = {rank: int(size) for rank, size in reported.items()}
        if not all(0 <= size <= _MOST_BYTES for size in sizes.values()):
            raise StormError(f"rank {self.group.transport.rank}: session.gather(): ranks announce {sizes} bytes")
        buffer = torch.zeros(max(sizes.values()), dtype=torch.uint8, device="cpu")
        buffer[: message.numel()] = message
        found = self._gather_all(buffer, "session.gather()")
        return {rank: unpack(each[: sizes[rank]]) for rank, each in found.items() if rank in sizes}

    def _reduce_over_members(self, value: float | torch.Tensor, what: str, *, mean: bool) -> Any:
        given = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
        own = given.detach().to("cpu", copy=True).contiguous()
        if own.dtype in (torch.float16, torch.bfloat16):
            own = own.float()
        rows = self._gather_all(own.reshape(-1), what) if own.numel() else {0: own}
        together = torch.stack(list(rows.values()))
        result = (together.sum(0) / len(rows) if mean else together.sum(0)).reshape(given.shape)
        if not isinstance(value, torch.Tensor):
            return float(result)
        kept = given.dtype if given.is_floating_point() or given.is_complex() or not mean else result.dtype
        return result.to(given.device, kept)

    @torch.no_grad()
    def _gather_all(self, own: torch.Tensor, what: str) -> dict[int, torch.Tensor]:
        """Returns the tensors of all current members, by rank label."""
        transport = self.group.transport
        members = self._participants()
        if members == [transport.rank]:
            return {self.label(transport.rank): own}
        name = self._channel_name()
        group = Group(transport, members, name=name, view=self.view.number).on_channel(name)
        with torch.inference_mode(False), in_call(what):
            rows = [torch.zeros_like(own) for _ in members]
            here = self._collect(group, rows, own)
            slots: int = getattr(transport, "capacity", transport.world)
            # By rank: 1 if its value arrived, plus 2 if it is already gone. The last element is the number of steps.
            reported = torch.zeros(slots + 1, dtype=torch.int64, device="cpu")
            latest = transport.view()
            assert latest is not None, "members have views"
            gone = {*members} - {rank for rank, _ in latest.members}
            reported[[*here]], reported[-1] = 1, self.steps
            reported[[*gone]] += 2
            all_reported = [torch.zeros_like(reported) for _ in members]
            confirmed = self._collect(group, all_reported, reported)
        known: dict[int, set[int]] = {}
        known_gone = gone
        for rank, each in zip(members, all_reported, strict=True):
            if rank not in confirmed - gone:
                continue
            if int(each[-1]) != self.steps:
                raise StormError(
                    f"rank {self.label(transport.rank)}: {what} after {self.steps} steps, but rank {self.label(rank)} "
                    f"has made {int(each[-1])}: call it on every rank, at the same step"
                )
            known[rank] = {other for other in members if each[other] & 1}
            known_gone &= {other for other in members if each[other] & 2}
        count, unsure = ranks_counted(members, here, known, known_gone)
        if unsure:
            dead = ", ".join(str(self.label(each)) for each in unsure)
            raise StormError(
                f"rank {self.label(transport.rank)}: {what}: ranks {dead} "
                "died during the call, so other ranks may count other values than this one: restart this rank"
            )
        return {self.label(rank): row for rank, row in zip(members, rows, strict=True) if rank in count}

    @staticmethod
    def _collect(group: Group, rows: list[torch.Tensor], own: torch.Tensor) -> set[int]:
        """Gathers tensors, and returns the ranks whose tensors arrived."""
        arrivals = collectives.all_gather(group, rows, rows[group.rank].copy_(own)).wait()
        own_rank = group.transport.rank
        arrived = {
            rank for each in arrivals for rank in group.ranks if rank != own_rank and each.fraction(peer=rank) == 1
        }
        return arrived | {own_rank}

    # --- who takes part -----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The current members."""
        return self.membership.view

    def label(self, rank: int) -> int:
        """Returns the number of a rank in messages and in the ledger: its rank in the group that was prepared."""
        raise NotImplementedError

    def on_view(self, newcomers: Sequence[int]) -> None:
        """Called when the session has applied a view, with the members that joined or rejoined with it.

        They make the same calls as the other ranks from their first step on. A new sequence of calls begins there,
        because joining ranks do not know how many calls there were before.
        """
        steps, still_new = self._new
        self._new = self.steps, {*newcomers} | (still_new if steps == self.steps else set())
        if self._new[1]:
            self._next_sequence = self.steps, self.view.number

    def _participants(self) -> list[int]:
        """Returns the members that make the same calls: not those that joined since the last step."""
        steps, new = self._new
        own = self.group.transport.rank
        if steps != self.steps:
            return list(self.view.members)
        return [own] if own in new else [rank for rank in self.view.members if rank not in new]

    def _channel_name(self) -> str:
        if self._next_sequence is not None and self._next_sequence[0] != self.steps:
            self._sequence, self._next_sequence = self._next_sequence[1], None
        return f"{self.name}/together/{self._sequence}"
