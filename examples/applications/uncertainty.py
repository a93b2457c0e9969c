"""A network that knows what it does not know, trained over a network that loses packets.

A classifier with a softmax must answer with one of its classes, and is often sure of itself where it has never seen
anything alike. DUQ (van Amersfoort and others, 2020: Uncertainty Estimation Using a Single Deep Deterministic Neural
Network) gives every class a centroid in a space of features, and answers with a kernel: how close is this picture to
the centroid? A picture far from all of them is unknown. One network and one pass tell it.

Here, ranks share scikit-learn's digits 0 to 4, and learn them; the digits 5 to 9 are what nobody has seen. The figure
is how well the largest kernel tells held-out known pictures from unknown ones (AUROC: 0.5 is guessing, 1 is perfect),
beside a softmax on the same network.

What to look at: gradients are those of a loss that has a gradient in itself (the penalty), and centroids are no
parameters but running means, in buffers. Every rank has its own, of the pictures that it has seen; `exact(model)`
gives all ranks their mean.

    python examples/applications/uncertainty.py --loss 0.1
    torchrun --nproc-per-node 2 examples/applications/uncertainty.py --policy model-averaging
    stormtorch lab run --hosts 4 --loss 0.1 --management -- python examples/applications/uncertainty.py
"""

import argparse

import torch
import torch.distributed as dist
from parts import auroc, contents_over_ranks, digits, mean_over_ranks, options, policy_of, start, traffic
from torch import nn
from torch.nn import functional

import stormtorch

KNOWN = 5  # the digits below are known, the others are not
BATCH = 32  # pictures of each rank in a step


def features(width: int = 64) -> nn.Sequential:
    """Makes the part that both networks have."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


class Kernels(nn.Module):
    """Features, and for each class a linear map to a small space in which it has a centroid.

    Args:
        sigma: Width of the kernel. Too wide, and everything is close to something.
        kept: How much of the running means of centroids each step keeps.
        size: Dimensions of the space of a class.
    """

    def __init__(self, sigma: float, kept: float = 0.99, size: int = 16, width: int = 64) -> None:
        super().__init__()
        self.sigma, self.kept = sigma, kept
        self.features = features(width)
        self.maps = nn.Parameter(torch.randn(size, KNOWN, width) * (2 / width) ** 0.5)
        # Sum and number of what a class has seen, both as running means: their quotient is its centroid. Means over
        # ranks of both give the centroid of all pictures, also where ranks have seen a class unequally often.
        self.register_buffer("count", torch.full((KNOWN,), BATCH / KNOWN))
        self.register_buffer("total", torch.randn(size, KNOWN) * 0.05 * BATCH / KNOWN)

    def places(self, pictures: torch.Tensor) -> torch.Tensor:
        """Returns where pictures lie in the space of each class."""
        return torch.einsum("bw,scw->bsc", self.features(pictures), self.maps)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Returns how close pictures are to each class: 1 at its centroid, 0 far away."""
        away = self.places(pictures) - self.total / self.count
        return torch.exp(-away.pow(2).mean(1) / (2 * self.sigma**2))

    @torch.no_grad()
    def follow(self, pictures: torch.Tensor, classes: torch.Tensor) -> None:
        """Moves centroids towards pictures of their class."""
        self.count.lerp_(classes.sum(0), 1 - self.kept)
        self.total.lerp_(torch.einsum("bsc,bc->sc", self.places(pictures), classes), 1 - self.kept)


def kernel_loss(model: Kernels, pictures: torch.Tensor, labels: torch.Tensor, penalty: float) -> torch.Tensor:
    """Computes whether each kernel is 1 for its class and 0 for others, and how far gradients are from length 1.

    The penalty keeps the features sensitive to what is in a picture: a network that ignores a difference cannot find
    it strange.
    """
    pictures = pictures.clone().requires_grad_()
    kernels = model(pictures)
    classes = functional.one_hot(labels, KNOWN).float()
    loss = functional.binary_cross_entropy(kernels.clamp(1e-6, 1 - 1e-6), classes, reduction="sum") / len(labels)
    (slope,) = torch.autograd.grad(kernels.sum(), pictures, create_graph=True)
    length = slope.pow(2).sum(1).clamp(min=1e-12).sqrt()
    return loss + penalty * (length - 1).pow(2).mean()


def train(arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Trains both networks, and returns how they do on pictures that were held out."""
    pictures, labels = digits()
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    learned, held_out = mixed[:1200], mixed[1200:]
    learned = learned[labels[learned] < KNOWN][dist.get_rank() :: dist.get_world_size()]  # this rank's share
    known, unknown = held_out[labels[held_out] < KNOWN], held_out[labels[held_out] >= KNOWN]
    own = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    found: dict[str, float] = {}
    for kind in ("kernel", "softmax"):
        torch.manual_seed(seed)
        model = Kernels(arguments.sigma) if kind == "kernel" else nn.Sequential(features(), nn.Linear(64, KNOWN))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
        model, optimizer = stormtorch.prepare(model, optimizer, policy=policy_of(arguments))
        for _ in range(arguments.steps):
            drawn = learned[torch.randint(len(learned), (BATCH,), generator=own)]
            if kind == "kernel":
                loss = kernel_loss(model, pictures[drawn], labels[drawn], arguments.penalty)
            else:
                loss = functional.cross_entropy(model(pictures[drawn]), labels[drawn])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "kernel":
                model.follow(pictures[drawn], functional.one_hot(labels[drawn], KNOWN).float())
        with stormtorch.exact(model), torch.no_grad():  # the same parameters and centroids on every rank
            scores = model if kind == "kernel" else lambda given: model(given).softmax(1)  # noqa: B023
            right = (scores(pictures[known]).argmax(1) == labels[known]).float().mean().item()
            found[f"{kind} accuracy"] = right
            sure, unsure = scores(pictures[known]).amax(1), scores(pictures[unknown]).amax(1)
            found[f"{kind} AUROC"] = auroc(sure, unsure)
            found["replicas"] = contents_over_ranks(model)
        found |= {f"{kind} {name}": value for name, value in traffic(optimizer).items()}
    return {name: mean_over_ranks([value]) for name, value in found.items()}


if __name__ == "__main__":
    parser = options(__doc__, steps=400)
    parser.add_argument("--sigma", type=float, default=0.1, help="width of the kernels (0.1)")
    parser.add_argument("--penalty", type=float, default=0.05, help="weight of the penalty on gradients (0.05)")
    start(train, parser)
