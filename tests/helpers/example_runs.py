"""Paths of the examples, and a parser of their last line."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST_LINE = re.compile(
    r"backend storm, (\d+) ranks: loss ([0-9.]+), accuracy ([0-9.]+)%, replicas (identical|DIFFERENT)"
)


def verdict(output: str) -> tuple[int, float, str]:
    """Ranks, accuracy in percent, and how the replicas compare, from an example's last line."""
    (found,) = LAST_LINE.findall(output)
    ranks, _loss, accuracy, replicas = found
    return int(ranks), float(accuracy), replicas
