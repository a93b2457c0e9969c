# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Models to train, ranks that train them on the simulated network, and a reference in one process with plain torch."""

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from stormtorch import EXACT, BoundedDrift, exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy

T = TypeVar("T")
Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[nn.Module], Optimizer]
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]

WORLD = 4
# What is right while parameters arrive is right when step() waits for them.
EXACTLY = BoundedDrift(gradients=EXACT, broadcast=EXACT, overlap=True)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


# --- models -----------------------------------------------------------------------------------------------------------


def perceptron(*, inside: int = 24, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, inside), nn.Tanh(), nn.Linear(inside, 6))


class Vector(nn.Module):
    """Nothing but numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(count))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.numbers * given).sum()


class Llama(nn.Module):
    """One block of LLaMA: RMSNorm, rotary attention, SwiGLU; the head is tied to the embedding."""

    def __init__(self, words: int = 32, width: int = 32, heads: int = 4, length: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(words, width)
        self.before_attention, self.before_mlp, self.last = (nn.RMSNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(half) / half))
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, given: torch.Tensor) -> torch.Tensor:
        even, odd = given.chunk(2, dim=-1)
        return torch.cat([even * self.cos - odd * self.sin, odd * self.cos + even * self.sin], dim=-1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        parts = self.qkv(self.before_attention(x)).view(*words.shape, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        logits: torch.Tensor = self.head(self.last(x))
        return logits


class Residual(nn.Module):
    """Two convolutions with batch normalisation, beside a short cut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)])
        self.stride, self.more = stride, outside - inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        short = functional.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return torch.relu(y + short)


def resnet20(width: int = 4) -> nn.Sequential:
    blocks: list[nn.Module] = []
    inside = width
    for stage in range(3):
        for place in range(3):
            blocks.append(Residual(inside, width << stage, 2 if stage and place == 0 else 1))
            inside = width << stage
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


class Recurrent(nn.Module):
    """An embedding, an LSTM of two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(20, 12),
            nn.LSTM(12, 16, 2, batch_first=True),
            nn.Linear(16, 20),
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.lstm(self.embedding(words))[0])
        return logits


# --- data -------------------------------------------------------------------------------------------------------------


def vectors(rank: int, step: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def words(rank: int, step: int, count: int = 32, length: int = 12) -> torch.Tensor:
    return torch.randint(count, (2, length), generator=torch.Generator().manual_seed(1000 * step + rank))


def images(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def regression(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(given)
    return (out.float() - given[:, :6].sin().float()).square().mean()


def next_word(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())


def classes(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(given), torch.arange(given.shape[0]))


# --- ranks ------------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What a rank of a test has."""

    rank: int
    world: int
    model: Any
    optimizer: Any

    def values(self) -> list[torch.Tensor]:
        """The exact parameters; collective."""
        with exact(self.model):
            return values(self.model)

    def train(
        self,
        steps: int | range,
        *,
        objective: Loss = regression,
        data: Callable[[int, int], torch.Tensor] = vectors,
        rank: int | None = None,
    ) -> list[float]:
        """The loop that everybody writes; returns the losses."""
        losses = []
        for step in range(steps) if isinstance(steps, int) else steps:
            found = objective(self.model, data(self.rank if rank is None else rank, step))
            found.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(found.item())
        return losses


def on_ranks(
    model: nn.Module,
    make: MakeOptimizer,
    work: Callable[[Rank], T],
    *,
    world: int = WORLD,
    policy: Policy = EXACTLY,
    seed: int = 1,
    **network: Any,
) -> list[T]:
    """Calls `work` on every rank of a simulated network, with a copy of the model that was prepared."""
    models = [copy.deepcopy(model) for _ in range(world)]

    def body(transport: Transport) -> T:
        rank = transport.rank
        optimizer = make(models[rank])
        prepare(models[rank], optimizer, policy=policy, group=Group(transport, range(world)))
        return work(Rank(rank, world, models[rank], optimizer))

    return SimulatedNetwork(world, seed=seed, **network).run(body)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def trained(
    model: nn.Module,
    make: MakeOptimizer,
    steps: int,
    *,
    objective: Loss = regression,
    data: Callable[[int, int], torch.Tensor] = vectors,
    **settings: Any,
) -> list[list[torch.Tensor]]:
    """Every rank's parameters after some steps."""

    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(steps, objective=objective, data=data)
        return rank.values()

    return on_ranks(model, make, work, **settings)


# --- without us -------------------------------------------------------------------------------------------------------


def mean_gradients(
    model: nn.Module, parts: Sequence[torch.Tensor], objective: Loss, scale: float = 1.0
) -> list[torch.Tensor | None]:
    """The mean over the ranks of each rank's gradient, summed in the order of ranks."""
    parameters = list(model.parameters())
    found: list[list[torch.Tensor]] = [[] for _ in parameters]
    for part in parts:
        model.zero_grad()
        (objective(model, part) * scale).backward()
        for place, parameter in enumerate(parameters):
            if parameter.grad is not None:
                found[place].append(parameter.grad.clone())
    model.zero_grad()
    return [functools.reduce(operator.add, each) / len(parts) if each else None for each in found]


def mean_in_float32(model: nn.Module, parts: Sequence[torch.Tensor], objective: Loss) -> list[torch.Tensor]:
    """The same of a model of fewer bits, as owners add it up."""
    each = [mean_gradients(model, [part], objective) for part in parts]
    return [
        torch.stack([given.float() for given in ranks if given is not None]).mean(0)
        for ranks in zip(*each, strict=True)
    ]


def plain_step(model: nn.Module, optimizer: Optimizer, gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def plain(
    model: nn.Module,
    make: MakeOptimizer,
    steps: int | range,
    *,
    objective: Loss = regression,
    data: Callable[[int, int], torch.Tensor] = vectors,
    world: int = WORLD,
) -> list[torch.Tensor]:
    """A copy of the model, trained by plain torch in this process on what all ranks are given."""
    model = copy.deepcopy(model)
    optimizer = make(model)
    for step in range(steps) if isinstance(steps, int) else steps:
        plain_step(model, optimizer, mean_gradients(model, [data(rank, step) for rank in range(world)], objective))
    return values(model)


# --- comparing --------------------------------------------------------------------------------------------------------


def assert_same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Equal to the last bit."""
    assert len(ours) == len(theirs) > 0
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(one, other), f"tensor {place} differs by {(one - other).abs().max()}"


def assert_close(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
