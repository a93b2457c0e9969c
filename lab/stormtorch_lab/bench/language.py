"""Language model that benchmarks train on ranks: its weights, its batches, and its loss on text that is held out."""

from pathlib import Path

import torch

from stormtorch_lab.bench.replicas import Replica, Workload, next_token_loss
from stormtorch_lab.jobs.control import Stage
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.models.llama import Llama, LlamaSize

# Sequences held out, over all ranks.
_VALIDATION_SEQUENCES = 64


def language_task(
    rank: int,
    world: int,
    *,
    size: LlamaSize,
    batch: int,
    context: int,
    lr: float,
    seed: int,
    text: Path | None = None,
) -> tuple[Workload, torch.Tensor]:
    """A LLaMA that reads bytes, learned by AdamW; and this rank's part of the text that is held out.

    Args:
        rank: This rank.
        world: Number of ranks.
        size: Size of the model.
        batch: Sequences that each rank learns from in a step.
        context: Bytes of a sequence.
        lr: Learning rate, which stays as it is.
        seed: Seed of weights and batches.
        text: What to read; None is the source of Python's standard library.
    """
    corpus = open_corpus(text)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Llama(size)

    def draw(step: int) -> torch.Tensor:
        # A step's sequences are drawn together and dealt out, so that ranks never draw the same numbers.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return _windows(corpus.training, batch * world, context, generator)[rank::world]

    held_out = _windows(corpus.validation, _VALIDATION_SEQUENCES, context, torch.Generator().manual_seed(0))
    task = Workload(model, lambda each: torch.optim.AdamW(each.parameters(), lr=lr, betas=(0.9, 0.95)), draw)
    return task, held_out[rank::world]


@torch.no_grad()
def evaluate(stage: Stage[Replica], replica: Replica, held_out: torch.Tensor) -> float:
    """Mean loss over all ranks' parts of what is held out, in nats, the same number on each."""
    # Of DistributedDataParallel, the module itself: a forward under it may look at its group.
    model = getattr(replica.model, "module", replica.model)
    with replica.judged():
        loss = next_token_loss(model(held_out[:, :-1]), held_out) if len(held_out) else torch.zeros(())
    sums = torch.tensor([float(loss) * len(held_out), len(held_out)], dtype=torch.float64)
    stage.control.allreduce([sums]).wait()
    return float(sums[0] / sums[1])


def slowest(stage: Stage[Replica], seconds: float) -> float:
    """Largest time of all ranks, the same number on each."""
    times_R = torch.zeros(stage.member.world, dtype=torch.float64)
    times_R[stage.member.rank] = seconds
    stage.control.allreduce([times_R]).wait()
    return float(times_R.max())


def _windows(text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences of `context` bytes and the one behind them, from anywhere in the text."""
    first = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[first + torch.arange(context + 1)].long()
