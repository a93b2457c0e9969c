"""Simulates any number of workers in one process: how packet loss affects a model's training, without a network.

    report = simulate(model, loss, batches, optimizer, workers=64, steps=300, network=Bernoulli(p=0.1))

Every virtual worker computes gradients on its own stale replica. The policies run the same code as on real ranks.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormtorch_lab.simulation.run import ProgressPoint, Simulated, simulate

__all__ = ["ProgressPoint", "Simulated", "simulate"]


def __getattr__(name: str) -> Any:
    # Lazy: torch takes seconds to import, and `stormtorch simulate --help` does not need it.
    if name in __all__:
        from stormtorch_lab.simulation import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
