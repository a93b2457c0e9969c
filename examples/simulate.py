"""Simulation of 32 virtual workers in one process that train any model while a fifth of what they send is lost.

    python examples/simulate.py

Every worker computes on its own stale replica. Unlike a training on real ranks, a simulation has no notion of time.
"""

import torch
from torch import nn

import stormtorch_lab
from stormtorch import EXACT, BoundedDrift

WORKERS, BATCH, STEPS = 32, 16, 100

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 5))
rule = torch.randn(20, 5)  # what the model has to learn


def examples(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws random points and returns them with their classes."""
    points = torch.randn(*shape, 20, generator=torch.Generator().manual_seed(seed))
    return points, (points @ rule).argmax(-1)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Computes the loss of one worker's batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the batches of workers first to last - 1, stacked."""
    points, classes = examples(step, WORKERS, BATCH)
    return points[first:last], classes[first:last]


def evaluate(model: nn.Module) -> tuple[float, float]:
    """Returns loss and accuracy on points that no worker has seen."""
    points, classes = examples(-1, 2000)
    answers = model(points)
    return float(nn.functional.cross_entropy(answers, classes)), float((answers.argmax(-1) == classes).float().mean())


policies = {
    "lossless": BoundedDrift(gradients=EXACT, broadcast=EXACT),
    "without a lead": BoundedDrift(lead=0.0),
    "with the lead": BoundedDrift(),
}
for name, policy in policies.items():
    found = stormtorch_lab.simulate(
        model,
        loss,
        batches,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        workers=WORKERS,
        steps=STEPS,
        network=0.2,
        policy=policy,
        evaluate=evaluate,
    )
    _, held_out, accuracy = found.validations[-1]
    print(
        f"{name}: loss {held_out:.4f}, accuracy {accuracy:.1%}, replicas differ by {found.drift**0.5:.1e}",
        flush=True,
    )
