"""Errors of commands for nearly correct inputs, and behaviour on a full disk."""

import json
from pathlib import Path

import pytest
import typer

from commands import call
from stormtorch.cli.console import save
from stormtorch.network.link_file import read_links
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.per_link import read_per_link

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("doctor", "localhost"), "for HOST: must be 2 to 64, got 1"),
        (("doctor", "localhost"), "stormtorch doctor localhost HOST"),
        (("lab", "run", "--rate", "400", "--", "true"), "must be a rate such as 400mbit, with its unit, got '400'"),
        (("lab", "run", "--", "nosuchprogram"), "for COMMAND: there is no program 'nosuchprogram' here"),
        (("lab", "run", "train.py"), "there is no program 'train.py' here: for a script, write python train.py"),
    ],
)
def test_errors_name_what_was_typed(words: tuple[str, ...], said: str) -> None:
    code, text = call(*words)
    assert code == 2
    assert said in " ".join(text.replace("│", " ").split())


def test_a_report_reads_the_files_of_a_folder_and_names_one_without_any(tmp_path: Path) -> None:
    code, text = call("report", str(tmp_path))
    assert code == 2
    assert "for FILE:" in text
    assert "is a folder without *.json" in " ".join(text.replace("│", " ").split())
    (tmp_path / "rank-0.jsonl").write_text("")
    code, text = call("report", str(tmp_path))
    assert code == 2
    assert "holds records of a job, not results: `stormtorch watch" in " ".join(text.replace("│", " ").split())
    (tmp_path / "strange.json").write_text("{}")
    code, text = call("report", str(tmp_path))
    assert code == 2
    assert "strange.json" in text.replace("│", "").replace("\n", "")


def test_a_file_that_could_not_be_written_whole_is_as_it_was(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    kept = tmp_path / "kept.json"
    kept.write_text("whole")
    for path in (kept, tmp_path / "new.json"):
        with pytest.raises(typer.Exit):
            save(write, path)
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]
    assert kept.read_text() == "whole"


def test_a_result_goes_through_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)

    def write(path: Path) -> None:
        path.write_text("new")

    save(write, link)
    assert target.read_text() == "new" and link.is_symlink()


def test_loss_of_a_host_is_that_of_its_links(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"hosts": [{"host": 1, "loss": 0.1}], "links": [{"from": 0, "to": 1, "loss": 0.3}]}))
    conditions = read_per_link(file, Conditions(loss=0.01), 3)
    losses = {(a, b): conditions.model(a, b).p for a in range(3) for b in range(3) if a != b}  # type: ignore[union-attr]
    assert losses == {(0, 1): 0.3, (1, 0): 0.1, (1, 2): 0.1, (2, 1): 0.1, (0, 2): 0.01, (2, 0): 0.01}
    assert {link: model.p for link, model in read_links(file, 3).links.items()} == {  # type: ignore[union-attr]
        link: p for link, p in losses.items() if p != 0.01
    }
