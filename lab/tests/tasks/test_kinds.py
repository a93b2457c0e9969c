"""Tasks by name: which settings and data are refused."""

from pathlib import Path
from typing import Any

import pytest

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.kinds import TASKS, open_task

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("name", "knobs", "knob"),
    [
        ("gpt", {}, "model"),
        ("resnet20", {"width": 64}, "width"),
        ("lstm", {"context": 64}, "context"),
        ("stories15m", {"layers": 2}, "layers"),
        ("stories15m", {}, "data"),
        ("lstm", {}, "data"),
        ("llama", {"width": 40}, "width"),
        ("llama", {"layers": 0}, "layers"),
        ("llama", {"lr": 0.0}, "lr"),
        ("llama", {"batch": 0}, "batch"),
        ("llama", {"held_out": 0}, "held_out"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, knobs: dict[str, Any], knob: str) -> None:
    with pytest.raises(BadSetting) as caught:
        open_task(name, **knobs)
    assert caught.value.name == knob


@pytest.mark.parametrize("name", TASKS)
def test_data_that_are_missing_or_something_else_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_bytes(b"nothing of that kind")
    for data in ("missing", "empty", "short"):
        with pytest.raises(BadSetting) as caught:
            open_task(name, tmp_path / data)
        assert caught.value.name == "data"
