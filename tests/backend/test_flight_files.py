"""Flight records are for their user alone: no other user can read or replace them."""

import logging
import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from full_disk import files_up_to
from stormtorch.backend.flight_recorder import FlightRecorder
from stormtorch.errors import PeerSilent
from stormtorch.telemetry.folders import FLIGHTS_VARIABLE

pytestmark = pytest.mark.pure


def record_of(folder: Path | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "world") -> Path:
    """Has an operation fail; returns the record that it leaves, which lies in `tmp_path` if no folder is given."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if folder is None:
        monkeypatch.delenv(FLIGHTS_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(FLIGHTS_VARIABLE, str(folder))
    before = set(tmp_path.rglob("*.json"))
    group: Any = SimpleNamespace(transport=SimpleNamespace(job="1"), name=name, rank=0, ranks=(0, 1))
    FlightRecorder(group).begin("all_reduce", 1, [torch.ones(3)])(PeerSilent("nothing was received from rank 1"))
    (path,) = set(tmp_path.rglob("*.json")) - before
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_records_lie_in_a_folder_of_this_user_alone_and_the_log_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.umask(os.umask(0))  # whatever it is, nothing here leans on it
    with caplog.at_level(logging.ERROR, "stormtorch"):
        path = record_of(None, monkeypatch, tmp_path)
    assert path.parent == tmp_path / f"stormtorch-flights-{os.getuid()}"
    assert mode_of(path.parent) == 0o700 and mode_of(path) == 0o600
    assert str(path) in caplog.text
    # Those of all ranks of a machine lie side by side.
    assert record_of(None, monkeypatch, tmp_path).parent == path.parent


@pytest.mark.parametrize("trap", ["link", "open to all", "file"])
def test_a_folder_that_is_not_this_users_alone_is_left_alone(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, elsewhere = tmp_path / f"stormtorch-flights-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if trap == "link":
        place.symlink_to(elsewhere)
    elif trap == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    path = record_of(None, monkeypatch, tmp_path)
    assert path.parent not in (place, elsewhere) and path.parent.parent == tmp_path
    assert mode_of(path.parent) == 0o700 and mode_of(path) == 0o600
    assert not list(elsewhere.iterdir())


def test_in_a_shared_folder_a_record_follows_no_link_and_replaces_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    foreseen = tmp_path / f"storm-flight-world-rank0-{os.getpid()}.json"
    foreseen.symlink_to(victim)
    path = record_of(tmp_path, monkeypatch, tmp_path)
    assert victim.read_text() == "precious" and foreseen.is_symlink()
    assert path.parent == tmp_path and mode_of(path) == 0o600
    again = record_of(tmp_path, monkeypatch, tmp_path)
    assert again != path and '"nothing was received' in path.read_text()


def test_the_name_of_a_group_leads_out_of_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    assert record_of(folder, monkeypatch, tmp_path, name="../../b").parent == folder


def test_half_a_record_on_a_full_disk_is_removed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would keep `stormtorch postmortem` from reading those of the other ranks."""
    monkeypatch.setenv(FLIGHTS_VARIABLE, str(tmp_path))
    group: Any = SimpleNamespace(transport=SimpleNamespace(job="1"), name="world", rank=0, ranks=(0, 1))
    with files_up_to(100):
        FlightRecorder(group).begin("all_reduce", 1, [torch.ones(3)])(PeerSilent("nothing was received from rank 1"))
    assert list(tmp_path.iterdir()) == []
    assert "could not write the flight record storm-flight-world-rank0" in caplog.text
