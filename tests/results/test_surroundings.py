"""Tests of `stormtorch.results.surroundings`: the conditions of the machine that are stored with every measurement."""

from pathlib import Path

import pytest

from stormtorch.results.surroundings import Withheld

pytestmark = pytest.mark.pure


def test_withheld_processor_time_is_a_share_of_what_was_wanted(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    #               user nice system idle waiting interrupts soft stolen guest
    stat.write_text("cpu  100 0 50 9000 10 5 5 40 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    withheld = Withheld(str(stat))
    assert withheld.share() == 0.0
    stat.write_text("cpu  140 10 60 19000 99 10 15 65 0 0\n")
    assert withheld.share() == pytest.approx(25 / (40 + 10 + 10 + 5 + 10 + 25))


def test_a_kernel_that_does_not_tell_gives_no_share(tmp_path: Path) -> None:
    assert Withheld(str(tmp_path / "nothing")).share() is None


def test_this_kernel_tells() -> None:
    share = Withheld().share()
    assert share is not None
    assert 0.0 <= share <= 1.0
