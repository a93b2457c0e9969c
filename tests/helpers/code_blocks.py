"""Code blocks of Markdown pages: which there are, how each is run, and which say that they are not.

A comment right before a fence says how to run the block:

    <!-- run: model -->             after that prelude of PRELUDES, which defines the names that the block uses
    <!-- run: continued -->         in the same program as the block of Python before it
    <!-- run: slow -->              among the slow tests; also `model, slow`
    <!-- not run: needs a GPU -->   not at all, for that reason

Without a comment, Python is a program of its own: two ranks if it meets others, otherwise one process.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from stormtorch.cli.app import app

ROOT = Path(__file__).parents[2]
# An indented fence stands in a list. Comments may have a line between them and the fence.
_FENCE = re.compile(
    r"^(?:<!-- *(?P<how>run|not run): *(?P<words>[^>]*?) *-->\n\n?)?"
    r"(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_INLINE = re.compile(r"(?<!`)`(stormtorch [a-z][^`]*)`(?!`)")
# typer carries a copy of click: this is that copy's error about a wrong use, whichever it is.
_USAGE: Any = typer.BadParameter.__base__
_MEETS = re.compile(r"init_process_group\(|env://")

_START = """
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import stormtorch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))


def train(step):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(2, (4,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

"""
_JOIN = 'dist.init_process_group("storm")\n'
_STORE = """
store, rank, world = next(dist.rendezvous("env://"))
train_one_step = train


def train(step):  # ends the program, where a reader's would go on for thousands of steps
    train_one_step(step)
    if step == 20:
        dist.destroy_process_group()
        raise SystemExit(0)

"""
PRELUDES = {
    "names": _START,
    "model": _START + _JOIN,
    "prepared": _START + _JOIN + "model, optimizer = stormtorch.prepare(model, optimizer)\nloss = train(0)\n",
    "checkpoint": _START
    + 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")\n'
    + _JOIN
    + "model, optimizer = stormtorch.prepare(model, optimizer)\n",
    "ddp": _START + _JOIN + "model = torch.nn.parallel.DistributedDataParallel(model)\n",
    "fsdp2": _START
    + _JOIN
    + "state = stormtorch.LossyGradients(wire=torch.bfloat16)\n"
    + "from torch.distributed.fsdp import fully_shard\n"
    + 'fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))\n',
    "store": _START + _STORE,
}
"""Programs that come before a block which is only a part of one."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    code: str
    how: str
    """Name of a prelude, "continued", or nothing."""
    reason: str
    """Why it is not run, or nothing."""
    slow: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Program:
    """Python of one or more blocks, run as one script."""

    place: str
    code: str
    slow: bool = False

    @property
    def ranks(self) -> int:
        return 2 if _MEETS.search(self.code) else 1


def pages() -> list[Path]:
    """README.md and all pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a page, from its beginning."""
    for found in _FENCE.finditer(text):
        indent = found["indent"]
        lines = [line.removeprefix(indent) for line in found["code"].splitlines()]
        refused = found["how"] == "not run"
        words = [] if refused else re.split(r", *", found["words"] or "")
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start("indent")) + 1,
            language=found["language"],
            code="\n".join(lines) + "\n",
            how="".join(word for word in words if word != "slow"),
            reason=found["words"] if refused else "",
            slow="slow" in words,
        )


def programs(found: list[Block]) -> list[Program]:
    """The Python of a page's blocks: each with its prelude, and with those that continue it."""
    made: list[Program] = []
    for block in found:
        if block.language != "python" or block.reason:
            continue
        if block.how == "continued":
            assert made, f"{block.place} continues nothing"
            made[-1].code += f"# {block.place}\n{block.code}"
            continue
        assert not block.how or block.how in PRELUDES, f"{block.place}: no prelude is called {block.how!r}"
        code = f"{PRELUDES.get(block.how, '')}# {block.place}\n{block.code}"
        made.append(Program(block.place, code, block.slow))
    return made


# --- commands ---------------------------------------------------------------------------------------------------------

FREE_WORDS = ("cp", "export", "kill", "pip", "sysctl")
"""Commands whose arguments nothing here can check."""


def commands(block: Block) -> list[str]:
    """The commands of a block of shell, with continued lines joined; none if the block is something else."""
    if block.language not in ("", "sh", "bash", "console"):
        return []
    lines = re.sub(r"\\\n\s*", " ", block.code).splitlines()
    found = [line for line in lines if line.strip() and not line.startswith("#")]
    if block.language == "" and not all(_is_command(line) for line in found):
        return []
    return found


def inline(text: str) -> list[str]:
    """The commands of stormtorch in the text of a page, outside its blocks."""
    return _INLINE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def check_command(line: str) -> str | None:
    """What is wrong with a command, or None."""
    words = _words(line)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return None
    tool, arguments = Path(words[0]).name, words[1:]
    if words[0].startswith("examples/"):
        return _check_script(words[0], [])
    if tool == "stormtorch":
        return _check_stormtorch(arguments)
    if tool == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        unknown = [word for word in arguments if "=" not in word and word not in targets]
        return f"make has no target {unknown[0]}" if unknown else None
    if tool in ("python", "torchrun", "sbatch"):
        for module in ("stormtorch", "stormtorch.cli"):
            if module in arguments and arguments[arguments.index(module) - 1] == "-m":
                return _check_stormtorch(arguments[arguments.index(module) + 1 :])
        if arguments[:2] == ["-m", "build"]:
            return None
        scripts = [index for index, word in enumerate(arguments) if word.endswith((".py", ".sbatch"))]
        return _check_script(arguments[scripts[0]], arguments[scripts[0] + 1 :]) if scripts else "runs no script"
    return None if tool in FREE_WORDS else f"{tool} is no command that is known here"


def _is_command(line: str) -> bool:
    tools = "|".join(("stormtorch", "make", "python", "torchrun", "sbatch", r"examples/\S+", *FREE_WORDS))
    return bool(re.match(rf"([A-Z_]+=\S+ )*({tools})( |$)", line))


def _words(line: str) -> list[str]:
    line = re.sub(r"\$\((.*?)\)", r"\1", line).partition(" | ")[0]
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in a comment
        return shlex.split(line.partition(" #")[0])


def _check_script(path: str, arguments: list[str]) -> str | None:
    """A script of this repository must exist, and mention each option, by itself or in a module beside it that it
    imports; one without a folder is the reader's own.
    """
    if "/" not in path:
        return None
    script = ROOT / path
    if not script.is_file():
        return f"{path} does not exist"
    text = script.read_text("utf-8")
    beside = [script.parent / f"{name}.py" for name in re.findall(r"^from (\w+) import", text, re.M)]
    text += "".join(each.read_text("utf-8") for each in beside if each.is_file())
    unknown = [word for word in arguments if word.startswith("--") and f'"{word}"' not in text]
    return f"{path} has no option {unknown[0]}" if unknown and path.endswith(".py") else None


def _check_stormtorch(arguments: list[str]) -> str | None:
    """What the command line itself says against these arguments; nothing is run."""
    command: Any = get_command(app)
    path = ["stormtorch"]
    while hasattr(command, "commands"):
        if not arguments or arguments[0] in ("...", "--help", "--version"):
            return None
        name, *arguments = arguments
        if name not in command.commands:
            return f"`{' '.join(path)}` has no command {name}"
        command, path = command.commands[name], [*path, name]
    if "--help" in arguments:
        return None
    try:
        command.make_context(path[-1], [word for word in arguments if word != "..."])
    except _USAGE as error:
        return str(error.format_message())
    return None
