"""Fine-tunes a small LLaMA on other text: frozen embeddings, bfloat16 autocast, warm-up, perplexity before and after.

Run it with `torchrun --nproc-per-node 2 examples/from_ddp/llama_ddp.py --data FOLDER`, where the folder holds
stories15M.bin, tokenizer.bin, and wiki.train.tokens and wiki.valid.tokens of WikiText-2. Without --data, a tiny model
with random weights learns Python's own source byte by byte.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from parts import text, windows
from torch.nn.parallel import DistributedDataParallel as DDP

from stormtorch_lab.tasks.data.tokens import open_stories
from stormtorch_lab.tasks.models.llama import Llama, LlamaSize

parser = argparse.ArgumentParser(description="Fine-tunes a small LLaMA.")
parser.add_argument("--data", type=Path, help="folder with a checkpoint, its tokenizer and text, or a packed file")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--save", type=Path, help="file for the weights at the end")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
if options.data:
    stories = open_stories(options.data)
    model = Llama(stories.size)
    model.load_state_dict(stories.state)
    training, held_out = stories.training.long(), stories.validation.long()
else:
    model = Llama(LlamaSize(layers=2, width=64, heads=4, tied=False))
    training, held_out = text(None)
model.embedding.requires_grad_(model.size.tied)  # frozen, unless it is the output matrix too
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
model = DDP(model)
torch.manual_seed(1 + rank)  # other data on each rank


def loss_of(given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the loss of the next token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(given)
    return torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), wanted.flatten())


def evaluate() -> float:
    """Returns the loss on held-out text, the same on all ranks."""
    model.eval()
    state = torch.random.get_rng_state()
    torch.manual_seed(rank)
    with torch.no_grad():
        loss = torch.stack([loss_of(*windows(held_out, 8, options.context)) for _ in range(4)]).mean()
    torch.random.set_rng_state(state)
    dist.all_reduce(loss)
    model.train()
    return loss.item() / dist.get_world_size()


before = evaluate()
for _ in range(options.steps):
    loss_of(*windows(training, options.batch, options.context)).backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
after = evaluate()
if rank == 0:
    print(f"perplexity {math.exp(before):.1f} before, {math.exp(after):.1f} after: loss {after:.3f}", flush=True)
    if options.save:
        torch.save(model.module.state_dict(), options.save)
dist.destroy_process_group()
