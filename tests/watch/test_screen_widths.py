"""The screen of `stormtorch watch` on narrow terminals: shorter bars, then fewer columns; no truncated cell."""

import pytest
from rich.console import Console

from records import job_of, make_records
from stormtorch.cli.tables.watch import screen
from stormtorch.watch.snapshot_json import snapshot

pytestmark = pytest.mark.pure


@pytest.mark.thorough
@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("ranks", [2, 3, 8, 12, 20])
def test_no_cell_is_cut(ranks: int, width: int) -> None:
    job = job_of(make_records(ranks))
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(screen(snapshot(job, job.arrived + 1.0, "runs/today")))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    heading = next(line for line in text.splitlines() if line.startswith("rank "))
    assert "a step" in heading and "lost" in heading
    assert ("overflow" in heading) == (width >= 80)
    assert "█" * (30 if width >= 100 else 20 if width >= 80 else 1) in text
