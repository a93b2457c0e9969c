"""Every code block of README.md and docs/: Python is run, commands are parsed by the real command line."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

import warm_scripts
from code_blocks import Program, blocks, check_command, commands, inline, pages, programs

pytestmark = pytest.mark.pure

PAGES = {page.name if page.name == "README.md" else f"docs/{page.name}": page for page in pages()}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
BLOCKS = {name: list(blocks(text, name)) for name, text in TEXTS.items()}
PROGRAMS = [program for found in BLOCKS.values() for program in programs(found)]
LANGUAGES = ("", "python", "json", "sh", "bash", "console")


def run(program: Program, folder: Path) -> str:
    """Runs a program on its ranks, each forked from a process that has imported torch. Returns what they printed."""
    script, output = folder / "block.py", folder / "output.txt"
    script.write_text(program.code, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    with output.open("w") as file:
        for rank in range(program.ranks):
            environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(program.ranks)}
            started.append(warm_scripts.start([str(script)], env=environment, stdout=file, stderr=file))
        try:
            statuses = [process.wait(100) for process in started]
        except subprocess.TimeoutExpired:
            statuses = [-1]
        finally:
            for process in started:
                process.kill()
    text = output.read_text()
    assert not any(statuses), f"{program.place} ended with {statuses}:\n{text}"
    return text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program",
    [pytest.param(program, id=program.place, marks=[pytest.mark.slow] if program.slow else []) for program in PROGRAMS],
)
def test_python_runs(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(program, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES)
def test_commands_are_those_that_exist(page: str) -> None:
    typed = [(block.place, line) for block in BLOCKS[page] if not block.reason for line in commands(block)]
    typed += [(page, line) for line in inline(TEXTS[page])]
    wrong = [f"{place}: {line}\n    {problem}" for place, line in typed if (problem := check_command(line))]
    # In a sentence, a command may be named without all its words.
    wrong = [each for each in wrong if not (each.startswith(f"{page}: ") and "Missing argument" in each)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    for block in BLOCKS[page]:
        assert block.language in LANGUAGES or block.reason, f"{block.place}: nothing here runs {block.language}"
        if block.language == "json" and not block.reason:
            json.loads(block.code)
    marked = TEXTS[page].count("<!-- not run:") + TEXTS[page].count("<!-- run:")
    used = sum(bool(block.how or block.reason or block.slow) for block in BLOCKS[page])
    assert marked == used, f"{page} has {marked} comments about running and {used} blocks right after one"


def test_there_are_blocks_to_run() -> None:
    assert len(PROGRAMS) >= 20
    assert sum(program.ranks == 2 for program in PROGRAMS) >= 10
    assert sum(bool(commands(block)) for found in BLOCKS.values() for block in found) >= 15


def test_a_block_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("text\n\n```python\nprint(undefined)\n```\n", "page")
    (program,) = programs([block])
    assert (block.place, program.ranks) == ("page:3", 1)
    with pytest.raises(AssertionError, match=r"(?s)page:3 ended with \[1\].*undefined"):
        run(program, tmp_path)


def test_comments_say_how_a_block_is_run() -> None:
    page = (
        "<!-- run: model -->\n```python\na = 1\n```\n<!-- run: continued -->\n\n```python\nb = a\n```\n"
        "<!-- not run: needs a GPU -->\n```python\nc = 1\n```\n<!-- run: names, slow -->\n```python\nd = 1\n```\n"
    )
    found = list(blocks(page, "page"))
    assert [(block.line, block.how, block.reason) for block in found] == [
        *((2, "model", ""), (7, "continued", ""), (11, "", "needs a GPU"), (15, "names", "")),
    ]
    program, slow = programs(found)
    assert (program.slow, slow.slow) == (False, True)
    assert program.ranks == 2
    assert program.code.endswith("# page:2\na = 1\n# page:7\nb = a\n")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("stormtorch train lm --loss 0.1 --seeds 3", None),
        ("stormtorch train lm --losses 0.1", "No such option"),
        ("stormtorch trian lm", "no command trian"),
        ("stormtorch theory --ranks many", "valid integer"),
        ("export STORM_KEY=$(stormtorch keygen)    # the same on every machine", None),
        ("stormtorch lab run --hosts 4 --loss 0.1 -- python train.py --epochs 3", None),
        ("make demo    # a comment", None),
        ("make domo", "no target domo"),
        ("python examples/elastic.py --store tcp://host0:29400 --rank 2 --world 4", None),
        ("python examples/elastic.py --stores tcp://host0:29400", "no option --stores"),
        ("python examples/gone.py", "does not exist"),
        ("python examples/applications/quantiles.py --quantile 0.9 --loss 0.1", None),
        ("python examples/applications/quantiles.py --losses 0.1", "no option --losses"),
        ("torchrun --nproc-per-node 2 -m stormtorch.cli simulate --workers 1024", None),
        ("frobnicate --now", "no command that is known"),
    ],
)
def test_a_command_is_checked_against_what_exists(command: str, problem: str | None) -> None:
    found = check_command(command)
    assert (found is None) if problem is None else (found is not None and problem in found), found
