"""Tests of `stormtorch_lab.jobs.surroundings`: the conditions of the machine, stored with every measurement."""

import subprocess
from pathlib import Path

import pytest

from stormtorch_lab.jobs.surroundings import StealTime, commit

pytestmark = pytest.mark.pure


def test_withheld_processor_time_is_a_share_of_what_was_wanted(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    #               user nice system idle waiting interrupts soft stolen guest
    stat.write_text("cpu  100 0 50 9000 10 5 5 40 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    withheld = StealTime(str(stat))
    assert withheld.share() == 0.0
    stat.write_text("cpu  140 10 60 19000 99 10 15 65 0 0\n")
    assert withheld.share() == pytest.approx(25 / (40 + 10 + 10 + 5 + 10 + 25))


def test_a_kernel_that_does_not_tell_gives_no_share(tmp_path: Path) -> None:
    assert StealTime(str(tmp_path / "nothing")).share() is None


def test_this_kernel_tells() -> None:
    share = StealTime().share()
    assert share is not None
    assert 0.0 <= share <= 1.0


def test_code_that_differs_from_its_commit_shows_and_results_that_are_written_do_not(tmp_path: Path) -> None:
    def git(*command: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *command], check=True)

    package, results = tmp_path / "package", tmp_path / "results"
    for folder, name in ((package, "code.py"), (results, "runs.json")):
        folder.mkdir()
        (folder / name).write_text("1\n")
    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "all")
    (results / "runs.json").write_text("2\n")
    known = commit(package)
    assert known is not None and not known.endswith("+changes")
    (package / "code.py").write_text("2\n")
    assert commit(package) == f"{known}+changes"
    assert commit(results) is None
