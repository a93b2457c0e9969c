"""Checks that optimizer settings agree on all ranks, because each rank's optimizer updates only its own shard."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.errors import Interrupted, StormError

# Entries of a parameter group that name what is trained, not how.
_NOT_SETTINGS = ("params", "param_names")
# Ranks that know of a difference wait at most this long for the values of a rank that does not.
_WAIT_LIMIT_S = 30.0
# A digest travels as a float32, which represents all integers below this exactly. 0 means no digest.
_DIGESTS = 1 << 24

# Stands for a value that cannot be compared, such as a function or a large tensor.
_OTHER = object()

PlainSettings = dict[str, Any]
"""The settings of one parameter group: numbers, truth values, strings, None and lists of them."""


class Hyperparameters:
    """Compares the optimizer settings of one rank with those of the other ranks.

    Args:
        optimizer: The optimizer whose parameter groups hold the settings.
        rule: What happens where settings differ; see `Policy.settings`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: str) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._known: list[_GroupDigest] = []

    @property
    def compared(self) -> bool:
        """Whether settings are compared at all."""
        return self._rule != "any"

    def digest(self, *, anywhere: bool = False) -> int:
        """Returns a digest of the settings, exact in float32; 0 if settings are not compared now.

        They are compared only inside a backward, where all ranks are at the same point of their program. A rank without
        a gradient calls this from its step, when its settings may have changed since the other ranks' backward.

        Args:
            anywhere: Whether all ranks are at the same point of their program, though not inside a backward.
        """
        if not self.compared or (torch._C._current_graph_task_id() == -1 and not anywhere):
            return 0
        groups = self._optimizer.param_groups
        if len(self._known) != len(groups):
            self._known = [_GroupDigest() for _ in groups]
        total = 0
        for known, group in zip(self._known, groups, strict=True):
            total = total * 31 + known.digest(group)
        return 1 + total % (_DIGESTS - 1)

    def agree(self, group: Group, ranks: Sequence[int], when: str) -> list[str]:
        """Compares settings value by value over a group. All its ranks must call it.

        Args:
            group: Ranks that compare their settings. Those of the first rank win if the rule says so.
            ranks: Label of each rank for messages.
            when: Time of the comparison, for messages.

        Returns:
            A description of each setting changed here because the first rank's win.

        Raises:
            ValueError: Settings differ, and the rule wants them to be the same.
        """
        gathered = self._gathered(group, f"rank {ranks[group.rank]}: cannot compare optimizer settings {when}")
        if gathered is None:
            return []  # the remaining members compare them in their next view
        differences = _differences(gathered, ranks) if self._rule == "same" else []
        if differences:
            raise ValueError(
                f"rank {ranks[group.rank]}: optimizer settings differ between ranks {when}: {'; '.join(differences)}. "
                "Each rank's optimizer moves its own shard of the parameters, so give all ranks the same (a scheduler "
                "that looks at a loss needs one that all ranks share), or let rank 0's hold everywhere: "
                'BoundedDrift(settings="rank 0")'
            )
        return self.adopt(gathered[0])

    def adopt(self, given: list[PlainSettings]) -> list[str]:
        """Adopts settings where they differ from this rank's. Returns a description of each change."""
        changed = []
        for place, (group, theirs) in enumerate(zip(self._optimizer.param_groups, given, strict=True)):
            for name, value in theirs.items():
                before = group.get(name)
                if name in group and _text(_plain(before)) == _text(value):
                    continue
                changed.append(f"settings: {name} of parameter group {place} was {_plain(before)!r}, is {value!r}")
                if isinstance(before, torch.Tensor):
                    before.fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) and not isinstance(before, list) else value
        return changed

    def take(self, group: Group, root: int, *, new: bool) -> None:
        """Broadcasts the root's settings to joining ranks. All ranks of the group must call it.

        Raises:
            Interrupted: A rank is gone, and another view begins without it.
        """
        if not self.compared:
            return
        gathered = self._gathered(group, f"rank {group.ranks[group.rank]}: cannot broadcast optimizer settings")
        if gathered is None:
            raise Interrupted(f"a rank left or died during {group.name}")
        if new:
            self.adopt(gathered[root])

    def _gathered(self, group: Group, failure: str) -> list[list[PlainSettings]] | None:
        """Gathers every rank's settings; None if a rank is gone."""
        try:
            return _gather([_plain_group(each) for each in self._optimizer.param_groups], group)
        except Interrupted:
            raise
        except StormError as error:
            wrapped = StormError(f"{failure}: {error}")
            wrapped.culprit = error.culprit
            raise wrapped from error


class _GroupDigest:
    """The digest of one parameter group. It updates only changed values: in most steps none or one."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._seen: list[object] = []
        self._parts: list[int] = []

    def digest(self, group: Mapping[str, Any]) -> int:
        """Returns a digest of the group's settings."""
        names, now = list(group), list(group.values())
        if names != self._names:
            self._names, self._seen, self._parts = names, [_OTHER] * len(names), [0] * len(names)
        for place, (value, before) in enumerate(zip(now, self._seen, strict=True)):
            if value is not before:
                self._parts[place] = _part(names[place], value)
                # The same object has the same value, except for a tensor, which must be read each time.
                if isinstance(value, torch.Tensor):
                    now[place] = _OTHER
        self._seen = now
        return sum(self._parts)


def _part(name: str, value: object) -> int:
    plain = _OTHER if name in _NOT_SETTINGS else _plain(value)
    return 0 if plain is _OTHER else zlib.crc32(f"{name}={_text(plain)}".encode())


def _gather(own: list[PlainSettings], group: Group) -> list[list[PlainSettings]] | None:
    """Gathers every rank's settings as JSON, which is never run as code; None if a rank is gone."""
    mine = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(group.size)]
    sizes[group.rank].fill_(mine.numel())
    arrivals = collectives.all_gather(group, sizes, sizes[group.rank], timeout_s=_WAIT_LIMIT_S).wait()
    memory = [bytearray(int(size)) for size in sizes]
    parts = [
        torch.frombuffer(each, dtype=torch.uint8) if each else torch.empty(0, dtype=torch.uint8) for each in memory
    ]
    arrivals += collectives.all_gather(group, parts, mine, timeout_s=_WAIT_LIMIT_S).wait()
    if any(arrival.arrived < 1.0 for arrival in arrivals):
        return None
    return [json.loads(bytes(each)) for each in memory]


def _differences(gathered: list[list[PlainSettings]], ranks: Sequence[int]) -> list[str]:
    found = []
    for place, groups in enumerate(zip(*gathered, strict=True)):
        for name in dict.fromkeys(name for group in groups for name in group):
            holders: dict[str, tuple[object, list[int]]] = {}
            for rank, group in zip(ranks, groups, strict=True):
                value = group.get(name)
                holders.setdefault(_text(value) if name in group else "", (value, []))[1].append(rank)
            if len(holders) > 1:
                sides = [
                    f"{_shown(value) if text else 'absent'} on {_named(who)}" for text, (value, who) in holders.items()
                ]
                found.append(f"{name} of parameter group {place} is {', '.join(sides)}")
    return found


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _shown(value: object) -> str:
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


def _plain_group(group: Mapping[str, Any]) -> PlainSettings:
    plain = {name: _plain(value) for name, value in group.items() if name not in _NOT_SETTINGS}
    return {name: value for name, value in plain.items() if value is not _OTHER}


def _plain(value: Any) -> Any:
    """Converts a setting to what JSON can hold; returns `_OTHER` for what cannot be compared."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_complex() else _OTHER
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, tuple | list):
        parts = [_plain(each) for each in value]
        return _OTHER if any(part is _OTHER for part in parts) else parts
    return _OTHER


def _text(value: object) -> str:
    """Converts a value to text that is the same for equal numbers, such as 1 and 1.0."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return repr(value * 1.0) if isinstance(value, int | float) else repr(value)
