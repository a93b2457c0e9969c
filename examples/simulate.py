"""Any model on 32 virtual workers in one process, while a fifth of all that they send is lost.

    python examples/simulate.py

Every worker computes on its own stale replica. What differs from a training on real ranks is time: there is none here.
"""

import torch
from torch import nn

import stormtorch
from stormtorch import EXACT, BoundedDrift

WORKERS, BATCH, STEPS = 32, 16, 100

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 5))
rule = torch.randn(20, 5)  # what is to be learned


def examples(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random points, and the classes they are of."""
    points = torch.randn(*shape, 20, generator=torch.Generator().manual_seed(seed))
    return points, (points @ rule).argmax(-1)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of one worker's batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of workers first to last - 1, stacked."""
    points, classes = examples(step, WORKERS, BATCH)
    return points[first:last], classes[first:last]


def evaluate(model: nn.Module) -> tuple[float, float]:
    """Loss and accuracy on points that no worker has seen."""
    points, classes = examples(-1, 2000)
    answers = model(points)
    return float(nn.functional.cross_entropy(answers, classes)), float((answers.argmax(-1) == classes).float().mean())


policies = {
    "lossless": BoundedDrift(gradients=EXACT, broadcast=EXACT),
    "without a lead": BoundedDrift(lead=0.0),
    "with the lead": BoundedDrift(),
}
for name, policy in policies.items():
    found = stormtorch.simulate(
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
    print(f"{name}: loss {held_out:.4f}, accuracy {accuracy:.1%}, replicas apart by {found.drift**0.5:.1e}", flush=True)
