"""`--policy my.py:MyPolicy`: a class in a file beside the presets, on ranks and on virtual workers."""

import json
from pathlib import Path

import pytest

from commands import call, ranks_left
from stormtorch import BoundedDrift
from stormtorch_lab.studies.settings import LmSettings, SimSettings

pytestmark = pytest.mark.pure

SMALL = ("--steps", "2", "--batch", "1", "--width", "16", "--layers", "1", "--context", "8", "--loss", "0.2")
SOURCE = '''
from dataclasses import dataclass

import stormtorch


@dataclass(frozen=True, kw_only=True)
class Halfway(stormtorch.BoundedDrift):
    """Leads by half the mean lag."""

    lead: float = 0.5


class Other:
    """Not a policy."""
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my own.py"
    path.write_text(SOURCE)
    return path


def test_a_policy_in_a_file_is_made_with_the_settings_that_it_has(file: Path) -> None:
    for kind in (SimSettings, LmSettings):
        settings = kind(policies=("lossless", f"{file}:Halfway"), max_lag=3, lead=1.0)
        assert settings.labels == ("lossless", "Halfway")
        assert settings.trainings == [(0, "lossless"), (0, "Halfway")]
        policy = settings.policy_of("Halfway")
        assert (type(policy).__name__, policy.lead, policy.max_lag) == ("Halfway", 0.5, 3)
        assert settings.to_json()["policies"] == ["lossless", f"{file}:Halfway"]


@pytest.mark.thorough
def test_a_policy_in_a_file_trains_on_ranks(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    files = ("--json", str(out), "--plot", str(picture))
    code, text = call("train", "lm", "--ranks", "2", *SMALL, "--policy", f"lossless,{file}:Halfway", *files)
    assert code == 0, text
    assert f"- Halfway comes from {file}." in " ".join(text.split())
    lossless, own = json.loads(out.read_text())["results"]
    assert (lossless["policy"], own["policy"]) == ("lossless", "Halfway")
    assert lossless["curve"][0] == own["curve"][0]
    assert own["drift"] > 0
    assert "<svg" in picture.read_text()
    assert ranks_left() == []


@pytest.mark.thorough
def test_a_policy_in_a_file_is_simulated_kept_and_computed_anew_once_it_was_edited(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture, lines, folder = (tmp_path / name for name in ("out.json", "out.svg", "steps.jsonl", "run"))
    files = ("--json", str(out), "--plot", str(picture), "--ledger", str(lines), "--checkpoint", str(folder))
    command = ("simulate", "--workers", "4", *SMALL, "--policy", f"{file}:Halfway,plain", "--device", "cpu", *files)
    for _ in range(2):  # the second time from the folder
        code, text = call(*command)
        assert code == 0, text
        assert "Halfway" in text
        assert [each["policy"] for each in json.loads(out.read_text())["results"]] == ["Halfway", "plain"]
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        assert [row["policy"] for row in rows] == ["Halfway", "Halfway", "plain", "plain"]
        assert len(list(folder.glob("Halfway-*-0.json"))) == 1
    file.write_text(SOURCE.replace("0.5", "2.0"))
    assert call(*command)[0] == 0
    assert len(list(folder.glob("Halfway-*-0.json"))) == 2
    assert len(list(folder.glob("plain-0.json"))) == 1


@pytest.mark.parametrize("command", [("train", "lm"), ("train", "image"), ("simulate",)], ids=" ".join)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py:Halfway", "there is no Python file nowhere.py"),
        ("FILE:Missing", "has no class Missing"),
        ("FILE:Other", "from stormtorch.OwnerPolicy"),
        ("FILE", "must name a class in a file"),
        ("BROKEN:Halfway", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("FILE:Halfway,COPY:Halfway", "must name each only once"),
    ],
)
def test_a_file_that_has_no_such_policy_is_told_by_the_option(
    command: tuple[str, ...], name: str, problem: str, file: Path
) -> None:
    broken, copy = file.with_name("broken.py"), file.with_name("copy.py")
    broken.write_text("import nowhere_to_be_found\n")
    copy.write_text(SOURCE)
    name = name.replace("FILE", str(file)).replace("BROKEN", str(broken)).replace("COPY", str(copy))
    code, text = call(*command, "--policy", name)
    assert code == 2
    assert "--policy" in text
    assert problem in " ".join(text.split()).replace(" │ │ ", " ")


def test_settings_that_no_policy_takes_are_refused_also_beside_files(file: Path) -> None:
    code, text = call("simulate", "--policy", f"{file}:Halfway", "--every", "2")
    assert code == 2
    assert "--every" in text
    assert "belongs to model-averaging, area, diloco" in text
    assert "and --policy has Halfway" in text


def test_wires_and_redundancies_reach_the_policy() -> None:
    for settings in (SimSettings(wire="int8", redundancy="auto"), LmSettings(wire="int8", redundancy="auto")):
        policy = settings.policy_of("lead")
        assert isinstance(policy, BoundedDrift)
        assert policy.wire.itemsize == 1
        assert policy.redundancy == "auto"
