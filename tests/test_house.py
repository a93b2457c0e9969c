"""The house: imports and includes run one way, and pages name files that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stormtorch"
FACE = "stormtorch"
FILE_NAME = re.compile(r"\b[\w.-]+/[\w./-]*\w\.(?:py|pyi|cpp|hpp|md|toml)\b")
PAGES = {
    "docs/architecture.md": ("", "docs", "src/stormtorch"),
    "docs/glossary.md": ("", "docs", "src/stormtorch"),
    "CONTRIBUTING.md": ("", "src/stormtorch"),
    "README.md": ("",),
}
"""Pages that name files with their folders, and where these names begin. A file to be written is called `my_...`."""


def modules(source: Path) -> dict[str, Path]:
    """The file of each module, by its full name."""
    found = {}
    for path in source.rglob("*.py"):
        parts = (FACE, *path.relative_to(source).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            # `from package import module` knows the module; `_engine` is native and has no file.
            own = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known or name == f"{FACE}._engine" else str(node.module) for name in own]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == FACE)


def circles(source: Path) -> list[set[str]]:
    """Sets of modules that reach each other by imports."""
    known = modules(source)
    graph = {name: set(imported(path, known)) & known.keys() - {name} for name, path in known.items()}
    reached = {name: reach(graph, name) for name in graph}
    found: list[set[str]] = []
    for name in sorted(graph):
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def reach(graph: dict[str, set[str]], begin: str) -> set[str]:
    """What can be reached from a module by one import or more."""
    found: set[str] = set()
    waiting = [begin]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def users_of_the_face(source: Path) -> list[str]:
    """Modules inside the package that import the package itself."""
    known = modules(source)
    return sorted(name for name, path in known.items() if name != FACE and FACE in imported(path, known))


def test_nobody_inside_imports_the_face() -> None:
    assert users_of_the_face(SOURCE) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(SOURCE) == []


@pytest.mark.parametrize(
    ("line", "by_face", "in_circle"),
    [
        ("import stormtorch", True, False),
        ("from stormtorch import prepare", True, False),
        ("from stormtorch import one", False, True),
        ("from stormtorch._engine import chunk_bytes", False, False),
        ("from stormtorch import _engine", False, False),
        ("from stormtorch.one import something", False, True),
        ("def later() -> None:\n    import stormtorch.one", False, True),
        ("import torch", False, False),
    ],
)
def test_a_planted_violation_is_found(line: str, by_face: bool, in_circle: bool, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from stormtorch import one, two\n")
    (tmp_path / "one.py").write_text("from stormtorch.two import anything\n")
    (tmp_path / "two.py").write_text(f"{line}\n")
    assert users_of_the_face(tmp_path) == (["stormtorch.two"] if by_face else [])
    circle = {"stormtorch.one", "stormtorch.two"} | ({"stormtorch"} if by_face else set())
    assert circles(tmp_path) == ([circle] if in_circle or by_face else [])


def engine_floors(page: str) -> list[set[str]]:
    """The folders of the engine on each floor, from the top, as the map draws them."""
    (drawn,) = (block for block in re.findall(r"^```\n(.*?)^```$", page, re.S | re.M) if "io | sim " in block)
    return [set(re.split(r" {2,}", line)[0].split(" | ")) for line in drawn.splitlines()]


def upward(floors: list[set[str]], engine: Path) -> list[str]:
    """Includes that do not lead to a lower floor or stay in their folder."""
    height = {folder: -number for number, floor in enumerate(floors) for folder in floor}
    return sorted(
        f"{path.relative_to(engine)} includes {name}"
        for folder in height
        for path in (*(engine / folder).glob("*.cpp"), *(engine / folder).glob("*.hpp"))
        for name in re.findall(r'^#include "(\w+)/', path.read_text(encoding="utf-8"), re.M)
        if name != folder and height.get(name, 1) >= height[folder]
    )


def test_includes_of_the_engine_run_downwards_as_the_map_draws_them() -> None:
    floors = engine_floors((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert {"core", "wire", "base"} <= set().union(*floors)
    # The lab's module beside the core's.
    assert set(upward(floors, ROOT / "engine")) == {"python/bindings_lab.cpp includes traffic"}


def test_an_include_that_leads_upwards_is_found(tmp_path: Path) -> None:
    for folder, line in (("core", '#include "wire/wire.hpp"'), ("wire", '#include "core/core.hpp"')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.hpp").write_text(f"{line}\n")
    assert upward([{"core"}, {"wire"}], tmp_path) == ["wire/wire.hpp includes core"]


def missing_files(page: str, folders: tuple[str, ...]) -> list[str]:
    """Names of files in a page that are in none of the folders."""
    names = {name for name in FILE_NAME.findall(page) if "my_" not in name}
    return sorted(name for name in names if not any((ROOT / folder / name).is_file() for folder in folders))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    assert missing_files((ROOT / page).read_text(encoding="utf-8"), PAGES[page]) == []


def test_a_file_that_does_not_exist_is_found() -> None:
    page = "`engine/core/core.hpp`, `runtime/prepare.py` and engine/core/gone.cpp"
    assert missing_files(page, ("", "src/stormtorch")) == ["engine/core/gone.cpp"]


def test_every_decision_is_listed_once() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\[(\d{4})\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(name for _, name in listed) == sorted(each.name for each in folder.glob("0*.md"))
    assert all(name.startswith(number) for number, name in listed)
