"""Tasks of every kind: batches, losses under vmap, learning rates, and held-out examples."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from stormtorch_lab.tasks.data.batches import Batch
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.kinds import TASKS, open_task
from stormtorch_lab.tasks.language import Text
from stormtorch_lab.tasks.task import Task
from task_files import tiny, write_atis, write_cifar10, write_wikitext

pytestmark = pytest.mark.pure


class Loss(nn.Module):
    """A task's loss as a module, so that `functional_call` can give it a model's parameters and buffers."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.task.loss(self.model, Batch(inputs, targets))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["llama", "stories15m", "resnet20"])
def test_stacked_workers_under_vmap_get_the_gradients_of_workers_one_by_one(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    losses = [Loss(task, task.model(seed)) for seed in range(3)]
    with torch.no_grad():
        for loss, seed in zip(losses, range(3), strict=True):
            for parameter in loss.parameters():  # also where every seed begins with the same weights
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    parameters, buffers = stack_module_state(losses)
    batch = task.batches(0, 2, 5, 1, 4)

    def one(own: dict[str, Any], moved: dict[str, Any], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(losses[0], (own, moved), (inputs, targets))
        return found

    together = vmap(one)(parameters, buffers, *batch)
    torch.autograd.backward(together.sum())
    for worker, loss in enumerate(losses):
        alone = loss(batch.inputs[worker], batch.targets[worker])
        alone.backward()
        torch.testing.assert_close(together[worker], alone)
        for key, parameter in loss.named_parameters():
            torch.testing.assert_close(parameters[key].grad[worker], parameter.grad, rtol=1e-3, atol=1e-5)
        for key, buffer in loss.named_buffers():
            torch.testing.assert_close(buffers[key][worker], buffer)
    # What would be equal anyhow shows nothing.
    assert len({round(float(loss), 4) for loss in together.detach()}) == 3


@pytest.mark.parametrize("name", TASKS)
def test_batches_depend_on_seed_step_and_worker_but_not_on_who_else_is_asked_for(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    whole = task.batches(3, 1, 5, 0, 5)
    assert whole.inputs.shape[:1] == whole.targets.shape[:1] == (5,)
    for cut in ((0, 2, 5), (0, 1, 4, 5)):
        parts = [task.batches(3, 1, 5, first, last) for first, last in pairwise(cut)]
        for at in range(2):
            assert torch.equal(torch.cat([part[at] for part in parts]), whole[at])
    for seed, step in ((4, 1), (3, 2)):
        other = task.batches(seed, step, 5, 0, 5)
        assert other.inputs.shape != whole.inputs.shape or not torch.equal(other.inputs, whole.inputs)


@pytest.mark.parametrize("name", TASKS)
def test_one_workers_batch_is_its_row_of_the_stacked_batches(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    stacked = task.batches(3, 1, 5, 0, 5)
    for worker in range(5):
        for own, rows in zip(task.batch(3, 1, worker, 5), stacked, strict=True):
            assert torch.equal(own, rows[worker])


def test_workers_with_generators_of_their_own_see_batches_of_their_own(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    settings: dict[str, Any] = {"width": 32, "layers": 1, "batch": 3, "lr": 1e-3, "context": 16}
    task = Text(open_corpus(tmp_path), own_generators=True, **settings)
    shared = Text(open_corpus(tmp_path), **settings)
    inputs = task.batches(3, 1, 5, 0, 5).inputs
    assert len(torch.unique(inputs.flatten(1), dim=0)) == 5
    # The number of workers changes nothing for any of them, unlike with one generator for all.
    assert torch.equal(task.batch(3, 1, 4, 9).inputs, inputs[4])
    assert torch.equal(shared.batch(3, 1, 0, 5).inputs, inputs[0])
    assert not torch.equal(shared.batch(3, 1, 1, 5).inputs, inputs[1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", TASKS)
def test_scores_of_parts_add_up_to_the_evaluation_and_parts_may_be_empty(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    model = task.model(0)
    loss, right = task.evaluate(model)
    for parts in (3, 300):
        scores = [task.score(model, part, parts) for part in range(parts)]
        answers = sum(score.answers for score in scores)
        assert answers == task.score(model).answers
        assert sum(score.loss for score in scores) / answers == pytest.approx(loss, rel=1e-5)
        assert sum(score.right for score in scores) / answers == pytest.approx(right, abs=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TASKS)
def test_a_model_is_that_of_its_seed_and_is_judged_without_being_changed(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    model, same = task.model(7), task.model(7)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert all(torch.equal(value, same.state_dict()[key]) for key, value in before.items())
    loss, right = task.evaluate(model)
    assert (loss, right) == task.evaluate(model)
    assert loss > 0
    assert 0 <= right <= 1
    assert model.training
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert task.to_json()["model"] == task.name == name
    assert task.language == (name in ("llama", "stories15m"))


@pytest.mark.parametrize("name", ["llama", "stories15m", "resnet20", "lstm"])
def test_a_few_steps_lower_the_loss(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    model = task.model(0)
    optimizer = task.optimizer(model.parameters())
    inputs, targets = task.batches(0, 0, 2, 0, 1)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = task.loss(model, Batch(inputs[0], targets[0]))
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_the_rate_of_pictures_steps_down_and_that_of_language_falls_as_a_cosine(tmp_path: Path) -> None:
    pictures, language = tiny("resnet20", tmp_path / "a"), tiny("llama", tmp_path / "b")
    assert [pictures.rate(step, 100) for step in (0, 4, 49, 50, 74, 75, 99)] == pytest.approx(
        [0.02, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )
    assert language.rate(4, 100) == pytest.approx(language.lr)
    assert language.rate(99, 100) == pytest.approx(language.lr / 10, rel=0.01)


def test_what_is_held_out_of_language_is_as_much_as_was_asked_for_and_counts_every_token(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    task = open_task("llama", tmp_path, context=16, width=32, held_out=5)
    model = task.model(0)
    seen = []
    model.register_forward_hook(lambda _module, given, _scores: seen.append(given[0].shape))
    task.evaluate(model)
    assert sum(shape[0] for shape in seen) == 5
    assert {shape[1] for shape in seen} == {16}


def test_the_record_says_how_many_examples_a_model_was_judged_by(tmp_path: Path) -> None:
    for name, folder in (("resnet20", write_cifar10(tmp_path / "a")), ("lstm", write_atis(tmp_path / "b"))):
        task = open_task(name, folder, held_out=3)
        model = task.model(0)
        seen: list[int] = []
        model.register_forward_hook(lambda _module, given, _scores, seen=seen: seen.append(len(given[0])))
        task.evaluate(model)
        assert task.to_json()["held_out"] == sum(seen) == 3
        everything = open_task(name, folder, held_out=1000).to_json()
        assert everything == open_task(name, folder).to_json()
        assert everything["held_out"] in (8, 40)
