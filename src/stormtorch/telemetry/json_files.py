"""Writing of reports as JSON files."""

import json
import math
import re
from pathlib import Path
from typing import Any


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes indented JSON, with each list of numbers on one line; creates missing folders."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def without_nan(data: Any) -> Any:
    """Replaces inf and NaN by None, at any depth: JSON has no such numbers, and diverged trainings produce them."""
    if isinstance(data, dict):
        return {key: without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
