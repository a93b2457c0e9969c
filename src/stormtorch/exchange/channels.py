"""Channels: named sequences of exchanges. Ranks that use the same name and sequence number are in the same exchange."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Channel:
    name: tuple[object, ...]
    number: int
    next_seq: int = 0


class Channels:
    """The channels of one transport, with the next sequence number of each."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[object, ...], _Channel] = {}
        self._by_number: dict[int, _Channel] = {}

    def take(self, name: tuple[object, ...], count: int = 1) -> tuple[int, int]:
        """Takes `count` sequence numbers of a channel; returns the channel's number and the first of them."""
        channel = self._by_name.get(name)
        if channel is None:
            channel = _Channel(name, _number(name))
            other = self._by_number.setdefault(channel.number, channel)
            if other is not channel:
                raise ValueError(f"channels {name} and {other.name} have the same hash: use another group name or tag")
            self._by_name[name] = channel
        first = channel.next_seq
        channel.next_seq += count
        return channel.number, first

    def __len__(self) -> int:
        return len(self._by_name)

    def forget(self, groups: Collection[str]) -> None:
        """Drops all channels of these groups. Never reuse their names: sequence numbers would restart at 0."""
        for name in [each for each in self._by_name if each[0] in groups]:
            channel = self._by_name.pop(name)
            self._by_number.pop(channel.number, None)

    def peek(self, name: tuple[object, ...]) -> tuple[int, int]:
        """Returns the channel's number and its next sequence number, which stays free."""
        channel = self._by_name.get(name)
        return (_number(name), 0) if channel is None else (channel.number, channel.next_seq)


def _number(name: tuple[object, ...]) -> int:
    # 32 bits keep the header short; `take` detects a collision within one transport.
    text = "\x1f".join(map(str, name)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
