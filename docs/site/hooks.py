"""Hooks of the docs site: navigation, files outside docs/, and drawings."""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

# Pages in reading order. A page that does not exist is left out, and one that is not here comes under "More".
NAVIGATION: dict[str, dict[str, str]] = {
    "Start here": {
        "Overview": "index.md",
        "Demo": "demo.md",
        "Concepts": "concepts.md",
        "Glossary": "glossary.md",
        "Guarantees and limits": "guarantees.md",
        "Choosing a policy": "choosing.md",
        "From DDP": "from-ddp.md",
    },
    "Training": {
        "prepare()": "prepare.md",
        "Optimizers and loops": "optimizers.md",
        "Frameworks": "frameworks.md",
        "Data": "data.md",
        "torch.distributed": "backend.md",
        "Your own policy": "policies.md",
        "Applications": "applications.md",
    },
    "Operating": {
        "Overview": "operating.md",
        "Launching": "launching.md",
        "Doctor": "doctor.md",
        "Watch": "watch.md",
        "Records and metrics": "records.md",
        "Reports": "report.md",
        "Network lab": "lab.md",
        "Chaos": "chaos.md",
        "Security": "security.md",
        "Troubleshooting": "troubleshooting.md",
    },
    "What loss costs": {
        "Results": "papers/results.md",
        "Theory": "theory.md",
        "Paper": "papers/paper.md",
        "Trainings side by side": "training.md",
        "Simulator": "simulate.md",
        "Fault injection": "faults.md",
        "Policies, measured": "papers/experiments/policies.md",
        "A web service, measured": "papers/benchmarks/colocate.md",
        "Applications, measured": "examples/applications/README.md",
        "Benchmarks": "papers/benchmarks/README.md",
        "Experiments": "papers/experiments/README.md",
    },
    "How it works": {
        "Architecture": "architecture.md",
        "Protocol": "protocol.md",
        "Membership": "membership.md",
        "Decisions": "decisions/README.md",
    },
    "Reference": {"API": "api.md", "Commands": "commands.md", "Releasing": "releasing.md"},
}
FIGURES = ("papers/experiments/policies.md", "papers/benchmarks/colocate.md", "examples/applications/README.md")
"""Pages of figures alone, which searches leave out."""
OUTSIDE_PAGES = (
    "papers/results.md",
    "papers/paper.md",
    "papers/benchmarks/README.md",
    "papers/experiments/README.md",
    "papers/experiments/LOG.md",
    *FIGURES,
)
"""Pages outside docs/ that belong to the site."""

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
DRAWING = re.compile(r"^!\[([^\]]*)\]\((drawings/[\w-]+\.svg)\)$", re.M)
FENCED = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.M | re.S)
SHOWN_AS_TEXT = {".py", ".sh", ".sbatch", ".service", ".yaml", ".toml", ".jsonl", ""}


def on_config(config: Any) -> Any:
    """Builds the navigation of the pages that exist."""
    pages = {each.relative_to(ROOT / "docs").as_posix() for each in (ROOT / "docs").glob("*.md")}
    pages |= {"decisions/README.md", "api.md", "commands.md", *OUTSIDE_PAGES}
    nav: list[Any] = [
        {section: [{title: page} for title, page in listed.items() if page in pages]}
        for section, listed in NAVIGATION.items()
    ]
    placed = {page for listed in NAVIGATION.values() for page in listed.values()} | {"papers/experiments/LOG.md"}
    more = sorted(pages - placed)
    config.nav = [*nav, {"More": more}] if more else nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/, and every file that a page links to."""
    for name in OUTSIDE_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for path, _ in LINK.findall(_outside_fences(page.content_string)):
            target = _repository_path(page.src_uri, path)
            name = _site_name(target) if target else None
            if target is None or name is None or files.get_file_from_path(name) is not None:
                continue
            if name.endswith("/files.md"):
                files.append(File.generated(config, name, content=_folder_page(target)))
                for each in _files_of(target):
                    if files.get_file_from_path(_site_name(each)) is None:
                        files.append(File.generated(config, _site_name(each), abs_src_path=str(ROOT / each)))
            else:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links at what the site has, and draws drawings in the page, where they follow its colours.

    Decisions, results and figures answer why, not how: searches leave them out.
    """
    if page.file.src_uri.startswith(("decisions/0", "papers/")) or page.file.src_uri in FIGURES:
        page.meta["search"] = {"exclude": True}

    def link(found: re.Match[str]) -> str:
        target = _repository_path(page.file.src_uri, found[1])
        name = _site_name(target) if target else None
        if name is None:
            return found[0]
        return posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".") + (found[2] or "")

    def drawing(found: re.Match[str]) -> str:
        svg = (ROOT / "docs" / found[2]).read_text(encoding="utf-8")
        svg = re.sub(r">\s+<", "><", svg[svg.index("<svg") :]).strip()
        return f'<figure class="drawing" role="img" aria-label="{found[1]}">{svg}</figure>'

    parts = FENCED.split(markdown)
    return "".join(
        part if index % 2 else LINK.sub(link, DRAWING.sub(drawing, part)) for index, part in enumerate(parts)
    )


# --- links that leave docs/ ------------------------------------------------------------------------------------------


def _files_of(folder: str) -> list[str]:
    return sorted(each.relative_to(ROOT).as_posix() for each in (ROOT / folder).iterdir() if each.is_file())


def _folder_page(folder: str) -> str:
    """A page that lists the files of a folder, each with the first words of its docstring or comment."""
    lines = [f"# {folder}", ""]
    for path in _files_of(folder):
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            words = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        else:
            words = next((line.lstrip("# ") for line in text.splitlines() if re.match(r"# \w", line)), "")
        lines.append(f"- [{posixpath.basename(path)}]({posixpath.basename(_site_name(path))}): {words}")
    return "\n".join(lines) + "\n"


def _outside_fences(markdown: str) -> str:
    return "".join(FENCED.split(markdown)[::2])


def _repository_path(page: str, link: str) -> str | None:
    """The path in the repository of what a page links to, if that lies outside docs/ or the page does."""
    if re.match(r"[a-z]+:", link):
        return None
    home = posixpath.dirname(page if page in OUTSIDE_PAGES else f"docs/{page}")
    target = posixpath.normpath(posixpath.join(home, link))
    inside = target.startswith("docs/") and page not in OUTSIDE_PAGES
    return None if inside or not (ROOT / target).exists() else target


def _site_name(target: str) -> str:
    """The path in the site of a file of the repository. Source is shown as text, and a folder by what is in it."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    path = ROOT / target
    if path.is_dir():
        readme = path / "README.md"
        return f"{target}/README.md" if readme.exists() else f"{target}/files.md"
    return f"{target}.txt" if path.suffix in SHOWN_AS_TEXT else target
