"""Output files are checked before the work, and a failure to write them does not lose the results."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from commands import call
from stormtorch.checks import BadSetting
from stormtorch.cli.console import check_file, save

pytestmark = pytest.mark.pure

COMMANDS = [
    ("bench", "allreduce"),
    ("bench", "ddp"),
    ("bench", "convergence"),
    ("bench", "sweep"),
    ("bench", "latency"),
    ("bench", "manners"),
    ("bench", "colocate"),
    ("bench", "colocate-virtual"),
    ("train", "lm"),
    ("train", "image"),
    ("simulate",),
    ("theory",),
    ("chaos",),
    ("lab", "run"),
]
WITHOUT_PLOT = (("bench", "latency"), ("bench", "manners"), ("lab", "run"))


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command does after its checks fails the test."""

    def begin(*_: object, **__: object) -> None:
        pytest.fail("the work began before the files were checked")

    for place in (
        "stormtorch_lab.bench.allreduce.run_allreduce",
        "stormtorch_lab.bench.ddp.run_ddp",
        "stormtorch_lab.bench.learning.run_convergence",
        "stormtorch_lab.bench.sweep.run_sweep",
        "stormtorch_lab.bench.latency.run_latency",
        "stormtorch_lab.bench.sharing.fairness.run_fairness",
        "stormtorch_lab.bench.services.colocate_run.run_colocate",
        "stormtorch_lab.studies.colocation.sweep.run_sweep",
        "stormtorch_lab.studies.on_ranks.run_training",
        "stormtorch_lab.studies.on_workers.run_simulations",
        "stormtorch.theory.predict",
        "stormtorch_lab.netns.lab.Lab",
        "stormtorch_lab.studies.chaos.run.run_chaos",
    ):
        monkeypatch.setattr(place, begin)


def outputs() -> list[tuple[tuple[str, ...], str]]:
    both = [(command, "--json") for command in COMMANDS]
    both += [(command, "--plot") for command in COMMANDS if command not in WITHOUT_PLOT]
    return [*both, (("simulate",), "--ledger")]


def typed(command: tuple[str, ...], option: str, path: Path) -> tuple[str, ...]:
    behind = ("--", "true") if command[0] == "lab" else ()
    return (*command, option, str(path), *behind)


@pytest.mark.thorough
@pytest.mark.parametrize(("command", "option"), outputs())
def test_a_folder_that_does_not_exist_is_named_before_the_work_and_not_made(
    command: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = call(*typed(command, option, Path("missing/deep/out.svg")))
    assert code == 2
    assert option in text
    assert "there is no folder missing/deep" in text
    assert not Path("missing").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_takes_no_file_is_found_out_before_the_work(command: tuple[str, ...]) -> None:
    code, text = call(*typed(command, "--json", Path("/proc/self/task/out.json")))  # not even of root
    assert code == 2
    assert "--json" in text
    assert "cannot write /proc/self/task/out.json" in text


def test_a_check_leaves_files_and_folders_as_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("from before")
    check_file("json", kept)
    check_file("json", tmp_path / "new.json")
    check_file("json", Path("/dev/null"))
    check_file("json", None)
    os.mkfifo(tmp_path / "pipe")
    check_file("json", tmp_path / "pipe")  # without a reader, to open it would take for ever
    assert kept.read_text() == "from before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "pipe"]


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"cannot write .*: it is a directory"):
        check_file("json", tmp_path)


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="File name too long"):
        check_file("json", tmp_path / ("x" * 300))


def test_a_disk_that_is_full_in_the_end_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(typer.Exit) as ending:
        save(full, Path("/dev/full"))
    assert ending.value.exit_code == 1
    assert capsys.readouterr().err.strip() == f"cannot write /dev/full: {os.strerror(errno.ENOSPC)}"
    written: list[Path] = []
    note: Callable[[Path], None] = written.append
    save(note, None)
    save(note, tmp_path)
    assert written == [tmp_path]


def full(path: Path) -> None:
    path.write_text("figures")
