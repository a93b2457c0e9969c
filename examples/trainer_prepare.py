"""The Trainer of Hugging Face transformers with prepare(), on two processes on this machine. Downloads nothing.

Run it with `torchrun --nproc-per-node 2 examples/trainer_prepare.py`.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import stormtorch
from digits import load, make_model, report
from stormtorch.integrations.transformers import StormTrainerMixin


class Classifier(torch.nn.Module):
    """A model as the Trainer wants it: it takes the columns of the data by name, and returns its loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(seed=0)

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scores pictures."""
        scores = self.model(pictures)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


class StormTrainer(StormTrainerMixin, Trainer):
    """A Trainer that trains by prepare(). Yours may have methods of its own."""


if __name__ == "__main__":
    dist.init_process_group("storm")  # before TrainingArguments, which then use this group
    train, test = load()
    rows = [[{"pictures": picture, "labels": label} for picture, label in part] for part in (train, test)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=10,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            eval_strategy="epoch",
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = StormTrainer(model=Classifier(), args=arguments, train_dataset=rows[0], eval_dataset=rows[1])
        trainer.train()
    with stormtorch.exact(trainer.model):
        report(trainer.model.model, test)
    dist.destroy_process_group()
