"""Federated detection of anomalies in time series, by tuning a small part of a pre-trained forecaster.

Four plants watch machines. What is strange differs from machine to machine, and no plant shows its measurements to
others. PeFAD (Xu and others, 2024: A Parameter-Efficient Federated Framework for Time Series Anomaly Detection) starts
from a large pre-trained language model, freezes most of it, and has clients train and exchange only a small part. What
the model predicts badly is strange.

Here, a small transformer is first trained on public series, sums of two sines, and then frozen. Every linear layer gets
an adapter beside it: a product of two thin matrices (LoRA), 9 % of the parameters together with the norms. Only these
are exchanged. All series are made from the seed: machines have shapes that the public series have not (saw teeth,
pulses, swelling and rectified waves); anomalies are spikes, shifts, a sensor that is stuck, and jumps in time, injected
into held-out windows. Every plant sets its own threshold, such that it takes one of 20 normal windows for strange.

The figures are AUROC (how well errors of strange windows are told from those of normal ones) and F1 at the thresholds:
of the frozen model, of the adapters, and of tuning everything; and the bytes that each of the two exchanges.

What to look at: the optimizer that is prepared has only the adapters. What is frozen travels once, before training.

    python examples/applications/anomalies.py --loss 0.1
    torchrun --nproc-per-node 2 examples/applications/anomalies.py --rank-of-adapters 2
    stormtorch lab run --hosts 4 --loss 0.1 --management -- python examples/applications/anomalies.py
"""

import argparse
import math

import torch
import torch.distributed as dist
from parts import auroc, contents_over_ranks, mean_over_ranks, options, policy_of, start, traffic
from torch import nn
from torch.nn import functional

import stormtorch

PATCH, PATCHES = 8, 13  # a window is so many patches of so many points; a patch is forecast from those before it
WINDOW = PATCH * PATCHES
SEEN_BEFORE = 4  # patches that a forecast needs before it counts
BATCH = 16  # windows of each rank in a step
NOISE = 0.05


class Block(nn.Module):
    """Attention to what came before, and a feed-forward network."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_before, self.norm_between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what both find to their input."""
        batch, patches, width = x.shape
        parts = self.attend(self.norm_before(x)).view(batch, patches, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, patches, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm_between(x))))


class Forecaster(nn.Module):
    """A transformer that forecasts each patch of a window from those before it."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(PATCH, width), nn.Linear(width, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(PATCHES - 1, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Returns the squared error of every forecast patch."""
        patches = windows.view(-1, PATCHES, PATCH)
        forecast = self.leave(self.norm(self.blocks(self.enter(patches[:, :-1]) + self.places)))
        return (forecast - patches[:, 1:]).pow(2).mean(2)


class Adapter(nn.Module):
    """A frozen linear layer, and beside it two thin matrices that start as no change at all."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the frozen layer says, corrected."""
        return self.frozen(x) + x @ self.down.T @ self.up.T


def freeze_but_adapters(model: Forecaster, rank: int) -> None:
    """Freezes a model, except for its norms, and gives the linear layers of its blocks adapters."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("attend", "mix", "widen", "narrow"):
            setattr(block, name, Adapter(getattr(block, name), rank))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_()


# --- series, all of them made -----------------------------------------------------------------------------------------


def public(count: int, generator: torch.Generator) -> torch.Tensor:
    """Makes windows that everybody may see: sums of two sines of random periods."""
    time = torch.arange(WINDOW)
    drawn = torch.rand(6, count, 1, generator=generator)
    period = 10 + 40 * drawn[0]
    fast = (0.3 + 0.7 * drawn[1]) * torch.sin(2 * math.pi * (time / period + drawn[2]))
    slow = 0.5 * drawn[3] * torch.sin(2 * math.pi * (time / period / (2 + 2 * drawn[4]) + drawn[5]))
    return fast + slow + NOISE * torch.randn(count, WINDOW, generator=generator)


def machine(kind: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Makes windows of the machine of one plant, from random moments of its life."""
    time = torch.arange(WINDOW) + 1000 * torch.rand(count, 1, generator=generator)
    turns = time / (16.0, 23.0, 31.0, 12.0)[kind]
    if kind == 0:  # saw teeth
        shape = 2 * (turns % 1) - 1
    elif kind == 1:  # pulses
        shape = torch.where(turns % 1 < 0.3, 1.0, -0.5)
    elif kind == 2:  # a wave that swells, and a faster one
        shape = torch.sin(2 * math.pi * turns) * (1 + 0.5 * torch.sin(2 * math.pi * time / 97))
        shape = shape + 0.4 * torch.sin(6 * math.pi * turns)
    else:  # a rectified wave on a slow one
        shape = 2 * torch.sin(math.pi * turns).abs() - 1 + 0.3 * torch.sin(2 * math.pi * time / 50)
    return 0.8 * shape + NOISE * torch.randn(count, WINDOW, generator=generator)


def strange(windows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns windows with one injected anomaly each, behind what a forecast needs."""
    windows, count = windows.clone(), len(windows)
    begins = torch.randint((SEEN_BEFORE + 1) * PATCH, WINDOW - 12, (count,), generator=generator).tolist()
    kinds = torch.randint(4, (count,), generator=generator).tolist()
    signs = (2.0 * torch.randint(2, (count,), generator=generator) - 1.0).tolist()
    for window, begin, kind, sign in zip(windows, begins, kinds, signs, strict=True):
        if kind == 0:  # a spike
            window[begin : begin + 2] += 0.6 * sign
        elif kind == 1:  # a shift
            window[begin : begin + 12] += 0.35 * sign
        elif kind == 2:  # a stuck sensor
            window[begin : begin + 12] = window[begin].item() + NOISE * torch.randn(12, generator=generator)
        else:  # a jump in time
            window[begin:] = window[begin - 5 : -5].clone()
    return windows


# --- training and judging ---------------------------------------------------------------------------------------------


def pretrain(seed: int, steps: int) -> Forecaster:
    """Trains a forecaster on public series, on rank 0, and gives it to all ranks, exactly."""
    torch.manual_seed(seed)
    model = Forecaster()
    if dist.get_rank() == 0:
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            model(public(32, generator)).mean().backward()
            optimizer.step()
            schedule.step()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model


@torch.no_grad()
def judge(model: Forecaster, held_out: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns, as the mean over plants, how well strange windows are told from normal ones."""
    worst = {name: model(windows)[:, SEEN_BEFORE:].amax(1) for name, windows in held_out.items()}
    threshold = worst["calibration"].quantile(0.95)  # this plant's own
    caught, wrong = int((worst["strange"] > threshold).sum()), int((worst["normal"] > threshold).sum())
    f1 = 2 * caught / (caught + wrong + len(worst["strange"]))
    return {
        "AUROC": mean_over_ranks([auroc(worst["strange"], worst["normal"])]),
        "F1": mean_over_ranks([f1]),
    }


def train(arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Pre-trains, tunes adapters, tunes everything, and judges all three."""
    plant = dist.get_rank() % 4
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    learned = machine(plant, 100, generator)
    held_out = {name: machine(plant, 200, generator) for name in ("calibration", "normal")}
    held_out["strange"] = strange(machine(plant, 200, generator), generator)

    base = pretrain(seed, arguments.pretrain).state_dict()
    found: dict[str, float] = {}
    for kind, lr in (("frozen", None), ("adapters", 1e-2), ("full", 2e-3)):
        torch.manual_seed(seed)
        model = Forecaster()
        model.load_state_dict(base)
        if lr is None:
            found |= {f"{kind} {name}": value for name, value in judge(model, held_out).items()}
            continue
        if kind == "adapters":
            freeze_but_adapters(model, arguments.rank_of_adapters)
        tuned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(tuned, lr=lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
        model, optimizer = stormtorch.prepare(model, optimizer, policy=policy_of(arguments))
        for _ in range(arguments.steps):
            drawn = torch.randint(len(learned), (BATCH,), generator=generator)
            model(learned[drawn]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with stormtorch.exact(model):
            measured = judge(model, held_out) | {"parameters": sum(each.numel() for each in tuned)}
            found["replicas"] = contents_over_ranks(model)
        found |= {f"{kind} {name}": value for name, value in (measured | traffic(optimizer)).items()}
    return found


if __name__ == "__main__":
    parser = options(__doc__, steps=200)
    parser.add_argument("--pretrain", type=int, default=300, help="steps on public series (300)")
    parser.add_argument("--rank-of-adapters", type=int, default=4, help="inner size of the adapters' matrices (4)")
    start(train, parser)
