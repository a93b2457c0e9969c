"""The language model of the benchmarks: weights, batches, and validation loss on held-out text."""

from pathlib import Path

import torch

from stormtorch_lab.bench.replicas import Replica, Workload, next_token_loss
from stormtorch_lab.jobs.control import Stage
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.models.llama import Llama, LlamaSize

# Held-out sequences, over all ranks.
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
    """A LLaMA on bytes, trained by AdamW, and this rank's part of the held-out text.

    Args:
        rank: This rank.
        world: Number of ranks.
        size: Size of the model.
        batch: Sequences of each rank per step.
        context: Bytes of a sequence.
        lr: Constant learning rate.
        seed: Seed of weights and batches.
        text: Training text; None is the source of Python's standard library.
    """
    corpus = open_corpus(text)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Llama(size)

    def draw(step: int) -> torch.Tensor:
        # The sequences of a step are drawn together and split, so that ranks never draw the same numbers.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return _windows(corpus.training, batch * world, context, generator)[rank::world]

    held_out = _windows(corpus.validation, _VALIDATION_SEQUENCES, context, torch.Generator().manual_seed(0))
    task = Workload(model, lambda each: torch.optim.AdamW(each.parameters(), lr=lr, betas=(0.9, 0.95)), draw)
    return task, held_out[rank::world]


@torch.no_grad()
def evaluate(stage: Stage[Replica], replica: Replica, held_out: torch.Tensor) -> float:
    """Mean validation loss in nats over all ranks' parts of the held-out text; the same on all ranks."""
    # Unwrap DistributedDataParallel: its forward may communicate in its group.
    model = getattr(replica.model, "module", replica.model)
    with replica.judged():
        loss = next_token_loss(model(held_out[:, :-1]), held_out) if len(held_out) else torch.zeros(())
    sums = torch.tensor([float(loss) * len(held_out), len(held_out)], dtype=torch.float64)
    stage.control.allreduce([sums]).wait()
    return float(sums[0] / sums[1])


def slowest(stage: Stage[Replica], seconds: float) -> float:
    """Largest time of all ranks; the same on all ranks."""
    times_R = torch.zeros(stage.member.world, dtype=torch.float64)
    times_R[stage.member.rank] = seconds
    stage.control.allreduce([times_R]).wait()
    return float(times_R.max())


def _windows(text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences of `context` bytes and the next byte, from random positions in the text."""
    first = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[first + torch.arange(context + 1)].long()
