"""Retained state of a policy between exchanges, per parameter: on its owner and on each rank."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

import torch


class MemoryStore:
    """Named vectors with one element per parameter element.

    Args:
        count: Number of elements of each vector.
        device: Device of the vectors.
    """

    def __init__(self, count: int, device: torch.device | str = "cpu") -> None:
        self.count = count
        self.vectors: dict[str, torch.Tensor] = {}
        """The vectors, float32. An element that was never written is 0."""
        self._device = device
        self._written: dict[str, list[tuple[int, int]]] = {}

    def chunks(self, first: int, rows: int, per_chunk: int) -> Memory:
        """Returns the memory of some chunks, as a policy sees it.

        Args:
            first: First element of the chunks.
            rows: Number of chunks.
            per_chunk: Elements of each.
        """
        return Memory(self, first, rows, per_chunk)

    def has(self, name: str, first: int, last: int) -> bool:
        """Whether all elements from `first` to before `last` were written under a name."""
        for begin, end in sorted(self._written.get(name, ())):
            if begin <= first < end:
                first = end
        return first >= last

    def vector(self, name: str) -> torch.Tensor:
        """Returns the vector of a name, and creates it if missing."""
        if name not in self.vectors:
            self.vectors[name] = torch.zeros(self.count, dtype=torch.float32, device=self._device)
        return self.vectors[name]

    def mark_written(self, name: str, first: int, last: int) -> None:
        """Marks elements of a name as written."""
        if not self.has(name, first, last):
            self._written.setdefault(name, []).append((first, last))

    def read(self, names: list[str], first: int, count: int) -> torch.Tensor:
        """Returns some elements of several vectors, stacked; unwritten ones are zero."""
        return torch.stack([self.vector(name)[first : first + count] for name in names])

    def write(self, names: list[str], first: int, values: torch.Tensor) -> None:
        """Writes what `read` returned, possibly on another rank."""
        for name, each in zip(names, values, strict=True):
            self.vector(name)[first : first + each.numel()] = each
            self.mark_written(name, first, first + each.numel())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the vectors, for a checkpoint."""
        return dict(self.vectors)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continues from the vectors of a checkpoint."""
        self.vectors = {name: each.to(self._device) for name, each in state.items()}
        self._written = {name: [(0, self.count)] for name in state}


class Memory(MutableMapping[str, torch.Tensor]):
    """Retained state of a policy for some chunks: float32 tensors (C, E) by name.

    Reading returns a view, so that in-place arithmetic is kept. Writing copies: read again before changing a value in
    place. Its attributes describe the call of a policy's function: rank, exchange, steps.

    Args:
        store: Vectors that hold the elements.
        first: First element of the chunks in the vectors.
        rows: Number of chunks, C.
        per_chunk: Elements of each, E.
    """

    def __init__(self, store: MemoryStore, first: int, rows: int, per_chunk: int) -> None:
        self._store = store
        self._first, self._last = first, first + rows * per_chunk
        self._shape = (rows, per_chunk)
        self.index = 0
        """Index of this rank among the members."""
        self.ranks = 1
        """Number of members."""
        self.round = 0
        """Number of the exchange, from 0 on."""
        self.steps = 0
        """Optimizer steps that this rank has made since it last took part in an exchange of these chunks."""
        self.arrived = 1.0
        """Fraction of all data for this rank that arrived in the exchange that it accepts now."""
        self.offset = first
        """Offset of the first element in the model, the same on all ranks."""

    def told(self, *, index: int, ranks: int, round_: int, steps: int = 0, offset: int = 0) -> Memory:
        """Sets the attributes that describe a call, and returns itself."""
        self.index, self.ranks, self.round, self.steps = index, ranks, round_, steps
        self.offset = offset + self._first
        return self

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(f"the memory has no {name!r} here: write it in begin_owner or begin_rank")
        return self._store.vector(name)[self._first : self._last].view(self._shape)

    def __setitem__(self, name: str, values: torch.Tensor) -> None:
        target = self._store.vector(name)[self._first : self._last].view(self._shape)
        if values.data_ptr() != target.data_ptr() or values.shape != target.shape:
            target.copy_(values)  # broadcasts, and refuses other shapes
        self._store.mark_written(name, self._first, self._last)

    def setdefault(self, name: str, default: torch.Tensor) -> torch.Tensor:
        """Returns the value of a name; writes the default first if there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._store.vectors and self._store.has(name, self._first, self._last)

    def __delitem__(self, name: str) -> None:
        raise TypeError("a name cannot be deleted from a policy's memory: write other values")

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._store.vectors if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


NO_MEMORY = MemoryStore(0).chunks(0, 0, 0)
"""Empty memory, for functions that are called without one."""
