"""Hook of the docs site that makes the pages of the API and of the commands from the code."""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

API: dict[str, list[str]] = {
    "Training": ["prepare", "exact", "no_sync", "clip_grad_norm_", "ElasticSampler", "Ledger"],
    "Policies": ["BoundedDrift", "ModelAveraging", "GradientAveraging", "OwnerPolicy", "RankPolicy", "Policy"],
    "What may be missing": ["Reliability", "EXACT", "LOSSY", "REPAIRED"],
    "Coming and going": ["Options", "connect", "join", "leave", "EtcdStore"],
    "Under torch.distributed": ["use_as_default", "LossyGradients", "lossy_hook", "lossy_reduce_scatter"],
    "Trying it": ["faults"],
}
"""Public names of the package in the order of the page. Others come at its end."""
MODULES = {  # of what `stormtorch` itself does not name
    "Rows of the ledger": "stormtorch.telemetry.ledger.LedgerRow",
    "Errors": "stormtorch.errors",
    "Collectives": "stormtorch.collectives",
    "Loss models": "stormtorch.network.loss",
    "Theory": "stormtorch.theory",
    "Simulator (stormtorch-lab)": "stormtorch_lab.simulation",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the two pages."""
    files.append(File.generated(config, "api.md", content=_api_page()))
    files.append(File.generated(config, "commands.md", content=_commands_page()))
    return files


def _public_names() -> list[str]:
    """The names in `stormtorch.__all__`, read from the source."""
    for node in ast.parse((ROOT / "src/stormtorch/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    raise ValueError("src/stormtorch/__init__.py has no __all__")


def _api_page() -> str:
    names = _public_names()
    gone = sorted({name for listed in API.values() for name in listed} - set(names))
    if gone:
        raise ValueError(f"docs/site/hooks.py lists {', '.join(gone)}, which stormtorch does not have")
    groups = dict(API)
    rest = [name for name in names if not any(name in listed for listed in API.values()) and name != "StormError"]
    if rest:
        groups["More"] = rest
    lines = ["# API", "", "All names that `stormtorch` has, from their docstrings; then some of its modules.", ""]
    for title, listed in groups.items():
        lines += [f"## {title}", "", *(f"::: stormtorch.{name}\n" for name in listed)]
    for title, module in MODULES.items():
        lines += [f"## {title}", "", f"::: {module}", "    options:", "      show_root_heading: false"]
        lines += ["      show_root_toc_entry: false", ""]
    return "\n".join(lines)


def _commands_page() -> str:
    """Every command with its options, from the command line itself."""
    import typer

    from stormtorch.cli.app import app

    lines = ["# Commands", "", "Every command and option, as `--help` shows them.", ""]
    _describe(typer.main.get_command(app), "stormtorch", lines)
    return "\n".join(lines) + "\n"


def _describe(command: Any, name: str, lines: list[str]) -> None:
    parts = getattr(command, "commands", {})
    words, _, examples = (command.help or "").partition("[bold]Examples[/bold]")
    if name != "stormtorch":
        lines += [f"## {name}", "", words.strip(), ""]
    shown = [line.strip() for line in examples.splitlines() if line.strip().startswith(("stormtorch", "export"))]
    if shown and not parts:
        lines += ["```", *shown, "```", ""]
    rows = [] if parts else [_row(each) for each in command.params if not each.hidden and each.name != "help"]
    if rows:
        lines += ["| option | default | |", "|---|---|---|", *rows, ""]
    for part, each in parts.items():
        _describe(each, f"{name} {part}", lines)


def _row(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    spelled = (
        "/".join([*parameter.opts, *parameter.secondary_opts]) if option else (parameter.metavar or parameter.name)
    )
    default = getattr(parameter.default, "value", parameter.default)  # an Enum's is its text
    shown = f"`{default}`" if isinstance(default, str | int | float) and not isinstance(default, bool) else ""
    words = re.sub(r"\s+", " ", getattr(parameter, "help", None) or "").replace("|", "\\|")
    return f"| `{spelled}` | {shown} | {words} |"
