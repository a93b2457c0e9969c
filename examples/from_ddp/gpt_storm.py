"""Pretrains a small GPT, in the manner of nanoGPT: accumulation, clipping, a schedule, rank 0 evaluates and saves.

Run it with `torchrun --nproc-per-node 2 examples/from_ddp/gpt_storm.py`.
"""

import argparse
import contextlib
import math
import os
import time
from pathlib import Path

import torch
from parts import GPT, text, windows
from torch.distributed import destroy_process_group, init_process_group

import stormtorch

parser = argparse.ArgumentParser(description="Pretrains a small GPT.")
parser.add_argument("--text", type=Path, help="file to learn from; default: Python's own source")
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--evaluate-every", type=int, default=20)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--bfloat16", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--checkpoint", type=Path, help="file to go on from if it exists, and to write")
options = parser.parse_args()

init_process_group("storm")
rank = int(os.environ["RANK"])
master = rank == 0
torch.manual_seed(1337 + rank)  # other data on each rank
training, held_out = text(options.text)
autocast = torch.autocast("cpu", dtype=torch.bfloat16) if options.bfloat16 else contextlib.nullcontext()

model = GPT(context=options.context)
decayed = [each for each in model.parameters() if each.dim() >= 2]
others = [each for each in model.parameters() if each.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
iteration = 0
if options.checkpoint and options.checkpoint.exists():
    saved = torch.load(options.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    iteration = saved["iteration"]
if options.compile:
    model = torch.compile(model)
model, optimizer = stormtorch.prepare(model, optimizer)
raw_model = model


def estimate_loss() -> float:
    """Returns the loss on held-out text."""
    raw_model.eval()
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    with torch.no_grad(), stormtorch.exact(model):
        losses = [raw_model(*windows(held_out, 16, options.context))[1].item() for _ in range(8)]
    torch.random.set_rng_state(generator)
    raw_model.train()
    return sum(losses) / len(losses)


def save() -> None:
    """Writes a checkpoint."""
    state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
    torch.save(state, options.checkpoint)


began = time.monotonic()
while iteration < options.iterations:
    warm = min(1.0, (iteration + 1) / 10)
    rate = options.lr * warm * 0.5 * (1.0 + math.cos(math.pi * iteration / options.iterations))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if master and iteration % options.evaluate_every == 0:
        print(f"iteration {iteration}: validation loss {estimate_loss():.3f}", flush=True)
        if options.checkpoint and iteration:
            save()
    for micro in range(options.accumulate):
        model.require_backward_grad_sync = micro == options.accumulate - 1
        with autocast:
            _, loss = model(*windows(training, options.batch, options.context))
        (loss / options.accumulate).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
if master:
    print(f"{iteration} iterations in {time.monotonic() - began:.1f} s: loss {estimate_loss():.3f}", flush=True)
    if options.checkpoint:
        save()
destroy_process_group()
