"""Files of the web page, and the report: the page as one file with its data inside."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

# In order of their imports: the report concatenates them into one script.
_MODULES = ("format.js", "matrix.js", "tables.js", "charts.js", "main.js")
_TYPES = {"js": "text/javascript", "css": "text/css"}


def page_file(name: str) -> tuple[bytes, str] | None:
    """Returns a file of the page with its content type; None for any other name."""
    found = _assets().get(name)
    return None if found is None else (found.read_bytes(), f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")


def index() -> bytes:
    """Returns the page itself."""
    return (files("stormtorch.watch") / "page" / "index.html").read_bytes()


def report(data: dict[str, Any]) -> str:
    """Returns the page with its data inside. It loads nothing, and runs only the scripts inside it."""
    charts, style = _text("uPlot.iife.min.js"), _text("uPlot.min.css") + "\n" + _text("style.css")
    program = f"(() => {{\n{''.join(_without_modules(_text(name)) for name in _MODULES)}}})();\n"
    licence = (files("stormtorch.watch") / "assets" / "uplot" / "LICENSE").read_text(encoding="utf-8")
    hashes = " ".join(_hash(script) for script in (charts, program))
    policy = f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    page = index().decode()
    page = _replaced(page, '<link rel="stylesheet" href="assets/uPlot.min.css">\n', "")
    page = _replaced(page, '<link rel="stylesheet" href="assets/style.css">', f"<style>{style}</style>")
    page = _replaced(
        page,
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    page = _replaced(
        page,
        '<script src="assets/uPlot.iife.min.js"></script>',
        f"<!-- The charts are drawn by uPlot:\n{licence.replace('--', '- -')}-->\n<script>{charts}</script>",
    )
    # Records may contain anything: without "<", data can neither end its element nor begin a comment.
    inside = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _replaced(
        page,
        '<script type="module" src="assets/main.js"></script>',
        f'<script type="application/json" id="data">{inside}</script>\n<script>{program}</script>',
    )


def _assets() -> dict[str, Traversable]:
    page, charts = files("stormtorch.watch") / "page", files("stormtorch.watch") / "assets" / "uplot"
    own = {name: page / name for name in (*_MODULES, "style.css")}
    return {**own, **{name: charts / name for name in ("uPlot.iife.min.js", "uPlot.min.css")}}


def _text(name: str) -> str:
    return _assets()[name].read_text(encoding="utf-8")


def _without_modules(script: str) -> str:
    """A module as a part of one script: without its imports and exports."""
    return re.sub(r"^export ", "", re.sub(r"^import .*;\n", "", script, flags=re.M), flags=re.M)


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _replaced(page: str, old: str, new: str) -> str:
    if page.count(old) != 1:
        raise ValueError(f"the page must have {old!r} once")
    return page.replace(old, new)
