"""Trains a tiny GPT-2 by the Trainer and prepare(), and goes on from its checkpoint. Prints a line of JSON."""
# mypy: disable-error-code="no-untyped-call, attr-defined, misc"

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import stormtorch
from stormtorch.integrations.transformers import StormTrainerMixin


class StormTrainer(StormTrainerMixin, Trainer):
    storm_policy = stormtorch.BoundedDrift(max_lag=8)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def trainer(folder: Path, epochs: int) -> Any:
    torch.manual_seed(dist.get_rank())  # prepare() gives all ranks rank 0's parameters
    size = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": (torch.arange(16) * step + step) % 32} for step in range(1, 33)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        bf16=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1000,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return StormTrainer(model=GPT2LMHeadModel(size), args=arguments, train_dataset=rows, eval_dataset=rows)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("storm", pg_options=stormtorch.Options(datagram_bytes=1472))
    with stormtorch.faults(loss=0.1, seed=1):
        first = trainer(folder, 4)
        first.train()
        with stormtorch.exact(first.model):
            end = flat(first.model).clone()
        latest = folder / f"checkpoint-{first.state.global_step}"
        dist.barrier()
        again = trainer(folder, 8)
        again.train(resume_from_checkpoint=str(latest))
        evaluated = again.evaluate()["eval_loss"]
    session = again.optimizer.optimizer.session
    read = GPT2LMHeadModel.from_pretrained(latest)
    report = {
        "rank": dist.get_rank(),
        "wrapped": type(again.model_wrapped).__name__,
        "saved": bool(torch.equal(flat(read), end)),
        "state": len(torch.load(latest / "optimizer.pt")["state"]),
        "parameters": len(list(read.parameters())),
        "steps": [first.optimizer.optimizer.session.steps, session.steps, again.state.global_step],
        "losses": [row["eval_loss"] for row in again.state.log_history if "eval_loss" in row],
        "evaluated": evaluated,
        "arrived": session.ledger.summary()["arrived"],
    }
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
