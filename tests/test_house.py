"""The house: nobody inside imports the package's face, and no two files import each other, directly or by others."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

SOURCE = Path(__file__).parents[1] / "src" / "stormtorch"
FACE = "stormtorch"


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
