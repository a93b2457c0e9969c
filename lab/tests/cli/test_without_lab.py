"""Errors for the lab's commands and names if the lab is not installed."""

import pytest
import typer
from typer.testing import CliRunner

import stormtorch
import stormtorch_lab
from stormtorch.cli.terminal.help_layout import LAB_COMMANDS, App
from stormtorch_lab.cli.app import add

pytestmark = pytest.mark.pure


def bare() -> App:
    app = App()
    app.command("one")(lambda: None)
    app.command("two")(lambda: None)
    return app


@pytest.mark.parametrize("name", LAB_COMMANDS)
def test_a_command_of_the_lab_says_how_to_install_it(name: str) -> None:
    done = CliRunner().invoke(bare(), [name])
    assert done.exit_code == 2
    assert "pip install stormtorch-lab" in " ".join(done.output.replace("│", " ").split())


def test_all_commands_of_the_lab_are_known_by_name() -> None:
    app = bare()
    before = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group
    add(app)
    assert set(typer.main.get_command(app).commands) - before == set(LAB_COMMANDS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", stormtorch_lab.__all__)
def test_a_name_of_the_lab_says_where_it_is(name: str) -> None:
    assert getattr(stormtorch_lab, name) is not None
    with pytest.raises(AttributeError, match=f"from stormtorch_lab import {name}$"):
        getattr(stormtorch, name)
