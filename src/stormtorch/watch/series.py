"""Time series of a job in bounded memory: at most `MOST_BINS` bins, however long it runs."""

import math
from dataclasses import dataclass, field

MOST_BINS = 600
"""Beyond this, neighbouring bins are merged: a chart as wide as a screen shows no more."""


@dataclass(slots=True)
class BinStatistics:
    """Statistics of one measure within one bin, over all ranks."""

    total: float = 0.0
    count: int = 0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float) -> None:
        """Adds one value."""
        self.total += value
        self.count += 1
        self.low, self.high = min(self.low, value), max(self.high, value)

    def merge(self, other: "BinStatistics") -> None:
        """Adds all values of another bin."""
        self.total += other.total
        self.count += other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass
class Series:
    """Measures over time. Bins start one second wide and double in width whenever there are too many."""

    width_s: float = 1.0
    start: float | None = None
    """Unix time at which bin 0 begins; a multiple of the width, so that bins merge evenly."""
    bins: dict[int, dict[str, BinStatistics]] = field(default_factory=dict)
    _last: int = 0

    def add(self, time: float, values: dict[str, float | None]) -> None:
        """Adds the values of one rank at one time; None values are skipped."""
        if self.start is None:
            self.start = float(int(time))
        place = int((time - self.start) // self.width_s)
        if place < 0:
            self._begin_earlier(time)
            place = int((time - self.start) // self.width_s)
        while max(place, self._last) >= MOST_BINS:
            self._widen()
            place //= 2
        self._last = max(self._last, place)
        cells = self.bins.setdefault(place, {})
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                cells.setdefault(name, BinStatistics()).add(value)

    def _begin_earlier(self, time: float) -> None:
        """Moves the start back, for a rank with an older first record than the ranks read before."""
        assert self.start is not None
        shift = int(-((time - self.start) // self.width_s))
        self.start -= shift * self.width_s
        self.bins = {place + shift: cells for place, cells in self.bins.items()}
        self._last += shift

    def _widen(self) -> None:
        merged: dict[int, dict[str, BinStatistics]] = {}
        for place, cells in self.bins.items():
            into = merged.setdefault(place // 2, {})
            for name, cell in cells.items():
                into.setdefault(name, BinStatistics()).merge(cell)
        self.bins, self.width_s, self._last = merged, self.width_s * 2, self._last // 2

    def columns(self, since: int = 0) -> dict[str, list[float | None]]:
        """Returns the bins from `since` on as columns: `time`, and `NAME`, `NAME_low`, `NAME_high` for each measure."""
        places = sorted(place for place in self.bins if place >= since)
        names = sorted({name for place in places for name in self.bins[place]})
        start = self.start or 0.0
        table: dict[str, list[float | None]] = {"time": [start + (place + 0.5) * self.width_s for place in places]}
        for name in names:
            cells = [self.bins[place].get(name) for place in places]
            table[name] = [None if cell is None else _short(cell.total / cell.count) for cell in cells]
            table[f"{name}_low"] = [None if cell is None else _short(cell.low) for cell in cells]
            table[f"{name}_high"] = [None if cell is None else _short(cell.high) for cell in cells]
        return table


def _short(value: float) -> float:
    """Rounds to five digits: a chart shows no more, and JSON shrinks to a third."""
    return float(f"{value:.5g}")
