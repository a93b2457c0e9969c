"""ElasticSampler in loops of one process: what counts as used, what a checkpoint holds, which mistakes it names."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from membership import Schedule
from stormtorch import ElasticSampler

pytestmark = pytest.mark.pure

DATA = list(range(50))


def loader_of(sampler: ElasticSampler, **settings: Any) -> DataLoader[int]:
    return DataLoader(DATA, batch_sampler=sampler, **settings)  # type: ignore[arg-type]


def used(batches: list[Any]) -> list[int]:
    return sorted(int(index) for batch in batches for index in batch)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_every_iteration_is_an_epoch_in_another_order() -> None:
    sampler = ElasticSampler(DATA, batch_size=8)
    epochs = [[index for batch in loader_of(sampler) for index in batch.tolist()] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [DATA] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert (len(sampler), sampler.epoch) == (7, 3)


def test_scripts_may_set_the_epoch_themselves() -> None:
    sampler = ElasticSampler(DATA, batch_size=8)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert used(list(loader_of(sampler))) == DATA
    sampler.set_epoch(0)
    again = [batch.tolist() for batch in loader_of(sampler)]
    assert again == [batch.tolist() for batch in loader_of(ElasticSampler(DATA, batch_size=8))]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_knows_what_steps_have_used_and_not_what_was_drawn(workers: int) -> None:
    sampler, optimizer = ElasticSampler(DATA, batch_size=8), an_optimizer()
    sampler.attach(optimizer)
    first: list[Any] = []
    for step in sampler.steps(loader_of(sampler, num_workers=workers)):
        first.extend(step)
        optimizer.step()
        if len(first) == 3:
            break
    other = ElasticSampler(DATA, batch_size=5)
    other.load_state_dict(sampler.state_dict())
    assert used([*first, *loader_of(other)]) == DATA
    # The loop that broke off goes on with the same.
    assert used([*first, *(batch for step in sampler.steps(loader_of(sampler)) for batch in step)]) == DATA


def test_a_loop_that_breaks_off_before_its_step_makes_it_again() -> None:
    sampler, optimizer = ElasticSampler(DATA, batch_size=8, shuffle=False), an_optimizer()
    sampler.attach(optimizer)
    for step in sampler.steps(loader_of(sampler)):
        assert [batch.tolist() for batch in step] == [list(range(8))]
        break
    assert next(next(sampler.steps(loader_of(sampler)))).tolist() == list(range(8))


def test_a_loop_may_begin_again_after_an_exception() -> None:
    sampler, optimizer = ElasticSampler(DATA, batch_size=8), an_optimizer()
    sampler.attach(optimizer)
    broken = sampler.steps(loader_of(sampler))
    batches = list(next(broken))
    optimizer.step()
    list(next(broken))  # its step fails, and the traceback keeps the loop
    steps = sampler.steps(loader_of(sampler))
    batches.extend(next(steps))
    del broken
    optimizer.step()
    for step in steps:
        batches.extend(step)
        optimizer.step()
    assert used(batches) == DATA


def test_a_step_that_a_scaler_leaves_out_has_used_its_batch() -> None:
    sampler, optimizer = ElasticSampler(DATA, batch_size=8), an_optimizer()
    sampler.attach(optimizer)
    batches: list[Any] = []
    for number, step in enumerate(sampler.steps(loader_of(sampler))):
        batches.extend(step)
        if number % 2:
            optimizer.step()
    assert used(batches) == DATA
    assert sampler.epoch == 1


def test_a_loop_that_leaves_batches_of_a_step_goes_on_with_the_next_step() -> None:
    sampler = ElasticSampler(DATA, batch_size=8, shuffle=False)
    seen = [sampler.micro_batches for _ in sampler.steps(loader_of(sampler))]
    assert seen == [1] * 7
    assert sampler.epoch == 1


def test_accumulated_batches_give_the_gradient_of_the_global_batch() -> None:
    torch.manual_seed(0)
    pictures = torch.randn(50, 3)
    model = nn.Linear(3, 1)
    sampler = ElasticSampler(pictures, batch_size=4, batch="constant", shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "global_batch": 10})  # saved by a larger job
    loader: DataLoader[Any] = DataLoader(pictures, batch_sampler=sampler)  # type: ignore[arg-type]
    for number, step in enumerate(sampler.steps(loader)):
        counts = []
        for batch in step:
            with sampler.accumulate(model):
                (model(batch).square().mean() * sampler.scale).backward()
            counts.append(len(batch))
        assert counts == [4, 3, 3]
        (grad,) = torch.autograd.grad(model(pictures[number * 10 :][:10]).square().mean(), [model.weight])
        torch.testing.assert_close(model.weight.grad, grad)
        model.zero_grad()


def test_only_the_last_batch_of_a_step_exchanges() -> None:
    entered = []

    class Model(nn.Module):
        def no_sync(self) -> Any:
            entered.append(len(seen))
            return torch.no_grad()

    seen: list[Any] = []
    sampler, model = ElasticSampler(12, batch_size=2, batch="constant"), Model()
    sampler.load_state_dict({**sampler.state_dict(), "global_batch": 6})
    for step in sampler.steps(DataLoader(range(12), batch_sampler=sampler)):  # type: ignore[arg-type]
        for batch in step:
            with sampler.accumulate(model):
                seen.append(batch)
    assert entered == [0, 1, 3, 4]


def test_a_rank_without_samples_gets_a_batch_of_weight_zero() -> None:
    schedule = Schedule(2, 3, batch_size=4)
    schedule.start()
    assert [[(len(batch), weight) for batch, weight in rank.hand] for rank in schedule.ranks.values()] == [
        [(1, 1.5)],
        [(1, 1.5)],
        [(2, 0.0)],
    ]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ElasticSampler(DATA, batch_size=0)
    with pytest.raises(ValueError, match="batch must be"):
        ElasticSampler(DATA, batch_size=1, batch="constance")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data must have at least one sample"):
        ElasticSampler([], batch_size=1)
    sampler = ElasticSampler(DATA, batch_size=8)
    with pytest.raises(ValueError, match="with this sampler"):
        next(sampler.steps(loader_of(ElasticSampler(DATA, batch_size=8))))
    with pytest.raises(ValueError, match="in_order=True"):
        next(sampler.steps(loader_of(sampler, num_workers=1, in_order=False)))
    with pytest.raises(ValueError, match="50 samples, this one has 51"):
        ElasticSampler(51, batch_size=8).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match=r"drop_last leaves nothing of 50 samples.*drop_last=False"):
        next(iter(loader_of(ElasticSampler(DATA, batch_size=51, drop_last=True))))
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="before the first batch"):
        sampler.attach(an_optimizer())


def test_a_rank_that_joins_with_other_settings_is_refused() -> None:
    schedule = Schedule(50, 2, batch_size=4)
    schedule.start()
    schedule.settings["batch_size"] = 5
    with pytest.raises(ValueError, match="batch_size=4, this rank one with batch_size=5"):
        schedule.change([0, 1, 2])


def test_a_rank_that_has_left_ends_its_loop() -> None:
    schedule = Schedule(50, 2, batch_size=4)
    schedule.start()
    leaving = schedule.ranks[1]
    schedule.change([0])
    leaving.session.view = schedule.view
    assert leaving.session.give and leaving.session.take
    leaving.session.take({0: schedule.ranks[0].session.give(), 1: leaving.session.give()})  # type: ignore[misc]
    assert leaving.loop is not None
    assert next(leaving.loop, None) is None
    with pytest.raises(RuntimeError, match="rank 1 is not in view 2"):
        next(leaving.sampler.steps(leaving.loader))


def test_a_returning_rank_in_a_plain_loop_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    schedule = Schedule(60, 3, batch_size=2, plain=True)
    schedule.start()
    schedule.cut_off(2)
    schedule.change([0, 1])
    schedule.complete()
    schedule.start()
    schedule.change([0, 1, 2])
    assert "rank 2 rejoins in view 3" in caplog.text


def test_a_session_without_views_has_the_ranks_of_its_group() -> None:
    group = SimpleNamespace(ranks=(1, 3), transport=SimpleNamespace(rank=3))
    optimizer = an_optimizer()
    optimizer.session = SimpleNamespace(group=group)  # type: ignore[attr-defined]
    sampler = ElasticSampler(12, batch_size=2, shuffle=False)
    sampler.attach(optimizer)
    assert list(sampler) == [[2, 3], [6, 7], [10, 11]]
    assert sampler.global_batch == 4
