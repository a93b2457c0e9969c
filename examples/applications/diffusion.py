"""A diffusion model that many clients share, with an embedding that each keeps to itself, under packet loss.

A diffusion model learns to remove noise from pictures, at every level of noise; from pure noise, step by step, it then
makes new ones. Clients here have different pictures: each has two of scikit-learn's ten digits. One model for all must
guess whose picture is in the noise. SPIRE (Ozkara, Zhou and Diggavi, 2025: Conditional Personalization for Federated
Diffusion Generative Models) has all clients train one network, and gives it a small vector that says who the client is.
Every client learns its own vector, its embedding, which here never leaves it. A new client learns nothing but its
embedding, while the network stays as it is.

Twelve clients are dealt to the ranks. The figure is the held-out denoising loss: the squared error of the clean picture
that the network sees in a noisy one, over all levels of noise; once with embeddings, and once without. Then four new
clients come, with pairs of digits that no other has: they learn 8 numbers each, and nothing is exchanged any more.

What to look at: embeddings are a part of the model that is prepared, and `personal=` says that they never travel. One
optimizer moves both, with a learning rate for each; at the end, ranks compare fingerprints, and find that the networks
are the same and all embeddings differ.

    python examples/applications/diffusion.py --loss 0.1
    torchrun --nproc-per-node 2 examples/applications/diffusion.py --policy model-averaging --every 4
    stormtorch lab run --hosts 4 --loss 0.1 --management -- python examples/applications/diffusion.py
"""

import argparse
import math

import torch
import torch.distributed as dist
from parts import contents_over_ranks, digits, mean_over_ranks, options, policy_of, start, traffic
from torch import nn
from torch.nn import functional

import stormtorch

# The two digits of each client. The pairs of new clients occur nowhere among the others, but each of their digits does.
CLIENTS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (0, 5), (1, 6), (2, 7), (3, 8), (4, 9), (0, 9), (1, 4))
NEW_CLIENTS = ((0, 3), (2, 6), (5, 8), (7, 9))
LEVELS = 50  # of noise
SIGNAL = torch.cumprod(1 - torch.linspace(1e-3, 0.15, LEVELS), 0)  # what is left of a picture's variance at each
EMBEDDING = 8  # numbers in an embedding
BATCH = 32  # pictures of each rank in a step


class Denoiser(nn.Module):
    """Guesses the clean picture in a noisy one. The embedding scales and shifts what flows through the layers."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.picture, self.level = nn.Linear(64, width), nn.Linear(16, width)
        self.client = nn.Linear(EMBEDDING, 2 * width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.clean = nn.Linear(width, 64)

    def forward(self, noisy: torch.Tensor, level: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Returns the clean picture, for each noisy one with its level of noise and its client's embedding."""
        waves = level[:, None] / LEVELS * 2 ** torch.arange(8) * math.pi / 4
        inside = functional.silu(self.picture(noisy) + self.level(torch.cat([waves.sin(), waves.cos()], 1)))
        scale, shift = self.client(embedding).chunk(2, 1)
        for layer in self.layers:
            inside = inside + functional.silu(layer(inside * (1 + scale) + shift))
        return self.clean(inside)


class Clients(nn.Module):
    """The denoiser that all ranks share, and the embeddings of one rank's clients, which begin as zero."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.denoiser = Denoiser()
        self.embeddings = nn.Embedding.from_pretrained(torch.zeros(clients, EMBEDDING), freeze=False)

    def forward(self, noisy: torch.Tensor, level: torch.Tensor, whose: torch.Tensor) -> torch.Tensor:
        """Returns the clean picture, for each noisy one with its level of noise and the number of its client."""
        return self.denoiser(noisy, level, self.embeddings(whose))


def denoising_loss(
    model: nn.Module, clean: torch.Tensor, whose: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Adds noise of random levels to pictures, and returns the squared error of what the model makes of them.

    `whose` tells the model of whom each picture is: the client's embedding, or its number if the model has embeddings.
    """
    level = torch.randint(LEVELS, (len(clean),), generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    left = SIGNAL[level][:, None]
    return functional.mse_loss(model(left.sqrt() * clean + (1 - left).sqrt() * noise, level, whose), clean)


def deal(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Deals the pictures of each digit to the clients that have it. Returns those to learn from and those held out."""
    pictures, labels = digits()
    pictures = 2 * pictures - 1
    generator = torch.Generator().manual_seed(seed)
    pairs = CLIENTS + NEW_CLIENTS
    dealt: list[list[torch.Tensor]] = [[] for _ in pairs]
    for digit in range(10):
        found = pictures[labels == digit]
        found = found[torch.randperm(len(found), generator=generator)]
        who = [index for index, pair in enumerate(pairs) if digit in pair]
        for index, part in zip(who, found.chunk(len(who)), strict=True):
            dealt[index].append(part)
    split = []
    for parts in dealt:
        own = torch.cat(parts)
        own = own[torch.randperm(len(own), generator=generator)]
        split.append((own[: len(own) * 3 // 4], own[len(own) * 3 // 4 :]))
    return split


@torch.no_grad()
def held_out_loss(model: Denoiser, clean: torch.Tensor, embedding: torch.Tensor) -> float:
    """Returns the denoising loss of a client; the noise is always the same, so that models can be compared."""
    clean = clean.repeat(20, 1)
    return float(denoising_loss(model, clean, embedding.expand(len(clean), -1), torch.Generator().manual_seed(0)))


def adapt(model: Denoiser, clean: torch.Tensor, seed: int, steps: int) -> torch.Tensor:
    """Returns an embedding for a new client, learned from its own pictures. The model stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.zeros(1, EMBEDDING, requires_grad=True)
    optimizer = torch.optim.Adam([embedding], lr=0.02)
    for _ in range(steps):
        loss = denoising_loss(model, clean, embedding.expand(len(clean), -1), generator)
        (embedding.grad,) = torch.autograd.grad(loss, [embedding])  # of the embedding alone: the model gets no gradient
        optimizer.step()
    return embedding.detach()


def train(arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Trains with embeddings and without, and returns held-out losses of old and new clients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > len(CLIENTS):
        raise SystemExit(f"{len(CLIENTS)} clients need at most as many ranks, got {ranks}")
    clients = deal(seed)
    own, new = clients[: len(CLIENTS)][rank::ranks], clients[len(CLIENTS) :][rank::ranks]
    learned = torch.cat([each for each, _ in own])
    whose = torch.cat([torch.full((len(each),), index) for index, (each, _) in enumerate(own)])

    found: dict[str, float] = {}
    for kind in ("with", "without"):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        torch.manual_seed(seed)
        model = Clients(len(own))
        model.embeddings.requires_grad_(kind == "with")  # otherwise they stay zero
        rates = [{"params": model.denoiser.parameters()}, {"params": model.embeddings.parameters(), "lr": 0.01}]
        optimizer = torch.optim.Adam(rates, lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
        # Ranks may even have different numbers of clients: what is personal may have another shape on each.
        model, optimizer = stormtorch.prepare(
            model, optimizer, policy=policy_of(arguments), personal=[model.embeddings]
        )
        for _ in range(arguments.steps):
            drawn = torch.randint(len(learned), (BATCH,), generator=generator)
            denoising_loss(model, learned[drawn], whose[drawn], generator).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        with stormtorch.exact(model):
            denoiser, embeddings = model.denoiser, model.embeddings.weight.detach()
            losses = [held_out_loss(denoiser, each, embeddings[index]) for index, (_, each) in enumerate(own)]
            found[f"{kind} embeddings"] = mean_over_ranks(losses)
            unknown = torch.zeros(EMBEDDING)
            losses = [held_out_loss(denoiser, each, unknown) for _, each in new]
            found[f"{kind} embeddings, new client"] = mean_over_ranks(losses)
            if kind == "with":
                adapted = [(test, adapt(denoiser, each, seed, arguments.adapt)) for each, test in new]
                losses = [held_out_loss(denoiser, test, embedding) for test, embedding in adapted]
                found["new client with its embedding"] = mean_over_ranks(losses)
                found["embeddings differ"] = contents_over_ranks(model.embeddings)
            found["replicas"] = contents_over_ranks(denoiser)
        found |= {f"{kind} {name}": value for name, value in traffic(optimizer).items()}
    return found


if __name__ == "__main__":
    parser = options(__doc__, steps=300)
    parser.add_argument("--adapt", type=int, default=200, help="steps in which a new client learns its embedding (200)")
    start(train, parser)
