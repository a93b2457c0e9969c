"""The map: docs/architecture.md and README.md name the files that exist, all of them, and draw the real floors."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Folders in which the page's names begin: it writes `runtime/gate.py` and `engine/core/core.cpp`, and in some drawings the
# bare names of the one folder that the drawing is about.
BEGINNINGS = ("", "src/stormtorch", "docs", "engine", "src/stormtorch/runtime")
FILE_NAME = re.compile(r"[\w./-]*\w\.(?:py|pyi|cpp|hpp|md|toml)\b")


def blocks(page: str) -> list[list[str]]:
    """The lines of each fenced block of a page."""
    return [block.strip("\n").splitlines()[1:] for block in re.findall(r"^```.*?(?=^```$)", page, re.DOTALL | re.M)]


def trees(page: str) -> list[list[str]]:
    """The blocks of a page that begin with a folder."""
    return [lines for lines in blocks(page) if re.match(r"[\w/]+/(\s|$)", lines[0])]


def entries(lines: list[str], separator: str) -> Iterator[str]:
    """The paths in a drawn tree. An indent of two leads into the folder above; words follow after two spaces."""
    folders: list[str] = []
    for line in lines:
        indent = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split(separator)
        del folders[indent:]
        for name in names:
            # `wire.hpp .cpp` is short for both files.
            stem, *suffixes = name.split(" .")
            yield "".join([*folders, stem])
            yield from ("".join([*folders, f"{stem.rpartition('.')[0]}.{suffix}"]) for suffix in suffixes)
        if names[0].endswith("/"):
            folders.append(names[0])


def drawn(page: str) -> list[str]:
    """All paths in the trees of the architecture page, folders with a slash at the end."""
    return [path for lines in trees(page) for path in entries(lines, ", ")]


def sources(root: Path) -> set[str]:
    """The files that the page must name."""
    python = (path for path in (root / "src/stormtorch").rglob("*.py") if path.name != "__init__.py")
    engine = (path for path in (root / "engine").iterdir() if path.suffix in (".cpp", ".hpp"))
    return {path.relative_to(root).as_posix() for path in (*python, *engine)}


def exists(path: str, root: Path) -> bool:
    """Whether a path exists, as a folder if and only if it ends with a slash."""
    return (root / path).is_dir() if path.endswith("/") else (root / path).is_file()


def mentioned(page: str) -> set[str]:
    """The file names in the text, the tables and the other drawings of the page."""
    for lines in trees(page):
        page = page.replace("\n".join(lines), "")
    return set(FILE_NAME.findall(page))


def floors(page: str) -> list[set[str]]:
    """The rooms of each floor, from the top, as the page draws them."""
    (lines,) = (lines for lines in blocks(page) if lines[0].startswith("floor"))
    found: list[set[str]] = []
    for line in lines[1:]:
        number, room = re.findall(r"^ {0,6}(\d*) +(\w+) {2}", line)[0]
        if number:
            found.append(set())
        found[-1].add(room)
    return found


def test_every_source_file_is_in_the_tree() -> None:
    missing = sorted(sources(ROOT) - set(drawn(PAGE)))
    assert not missing, f"docs/architecture.md lacks {', '.join(missing)}: add each to the tree, with a few words"


def test_everything_in_the_tree_exists_and_is_named_once() -> None:
    paths = drawn(PAGE)
    gone = [path for path in paths if not exists(path, ROOT)]
    assert not gone, f"the tree in docs/architecture.md names {', '.join(gone)}, which do not exist"
    assert sorted({path for path in paths if paths.count(path) > 1}) == []


def test_every_file_that_the_text_mentions_exists() -> None:
    found = mentioned(PAGE)
    assert len(found) > 50
    gone = sorted(name for name in found if not any((ROOT / begin / name).is_file() for begin in BEGINNINGS))
    assert not gone, f"the text of docs/architecture.md mentions {', '.join(gone)}, which do not exist"


def test_the_floors_are_those_that_the_linter_checks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    assert floors(PAGE) == [set(layer.split(" | ")) for layer in layers]


def test_the_short_tree_of_the_readme_exists() -> None:
    (lines,) = trees(README)
    paths = list(entries(lines, " "))
    gone = [path for path in paths if not exists(path, ROOT)]
    assert not gone, f"the tree in README.md names {', '.join(gone)}, which do not exist"
    assert {"engine/", "src/stormtorch/", "tests/", "docs/"} <= set(paths)


def test_every_decision_has_a_row() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^\| \[(\d{4})\]\((\S+)\)", (folder / "README.md").read_text(encoding="utf-8"), re.M)
    assert [name for _, name in listed] == sorted(each.name for each in folder.glob("0*.md"))
    assert all(name.startswith(number) for number, name in listed)


def test_a_tree_is_read_with_its_folders_and_its_short_forms() -> None:
    engine = "engine/\n  wire.hpp .cpp  layout\n  tests/  tests\n"
    python = "src/a/\n  b/   a room\n    c.py, d.py   files\n  e.py   file\n"
    page = f"text\n```\n{engine}```\nmore\n```\n{python}```\n"
    assert drawn(page) == [
        *("engine/", "engine/wire/wire.hpp", "engine/wire/wire.cpp", "engine/tests/"),
        *("src/a/", "src/a/b/", "src/a/b/c.py", "src/a/b/d.py", "src/a/e.py"),
    ]
    assert mentioned(f"see `x/y.py` and z.hpp:\n{page}") == {"x/y.py", "z.hpp"}
