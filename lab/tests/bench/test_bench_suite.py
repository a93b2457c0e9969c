"""The suite of `make bench`: its commands exist, its parts can be chosen, and the README quotes its results."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from commands import call
from stormtorch.checks import BadSetting
from stormtorch_lab.bench.suite import PARTS, SUITE, chosen

ROOT = Path(__file__).parents[3]


def test_parts_are_chosen_in_the_order_of_the_suite() -> None:
    assert [each.part for each in chosen(("cable", "allreduce"))] == ["allreduce"] * 2 + ["cable"] * 2
    assert chosen(PARTS) == list(SUITE)
    assert len({each.file for each in SUITE}) == len(SUITE)
    with pytest.raises(BadSetting, match=r"^only "):
        chosen(("everything",))


@pytest.mark.thorough
@pytest.mark.parametrize("words", [each.words for each in SUITE])
def test_every_command_of_the_suite_has_only_options_that_exist(words: str) -> None:
    command, *options = shlex.split(words)
    code, text = call("bench", command, "--help")
    assert code == 0
    missing = [word for word in options if word.startswith("--") and word not in text]
    assert missing == []


def test_a_part_that_fails_or_cannot_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no mpirun
    code, text = call("bench", "all", "--only", "mpi", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "mpi is skipped: this machine has mpi only where Open MPI and mpi4py are" in text
    assert os.listdir(tmp_path / "out") == []
    code, text = call("bench", "all", "--only", "tea")
    assert (code, "--only" in text) == (2, True)


def test_the_figures_in_the_readme_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "papers" / "benchmarks"))
    monkeypatch.delitem(sys.modules, "figures", raising=False)
    import figures  # type: ignore[import-not-found]  # a script

    text = (ROOT / "papers" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert figures.table().count("\n") > 20
    assert text == figures.renewed(text), "run: python papers/benchmarks/figures.py"
    assert figures.rarely() in (ROOT / "docs" / "applications.md").read_text(encoding="utf-8")
