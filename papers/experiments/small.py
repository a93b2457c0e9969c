"""The small model of the experiments that want many runs: 0.12 M parameters, 16 workers, a minute on one core."""

from __future__ import annotations

import argparse
from typing import Any

from stormtorch_lab.studies.settings import SimSettings


def small(chosen: argparse.Namespace, **other: Any) -> SimSettings:
    """Learns WikiText-2 from scratch."""
    options: dict[str, Any] = {
        "model": "llama",
        "data": chosen.data / "wikitext-2",
        "workers": 16,
        "batch": 8,
        "steps": 300,
        "held_out": 512,
        "device": "cpu",
    }
    return SimSettings(**(options | other))
