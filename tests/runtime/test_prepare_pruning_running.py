"""A process that joins a training whose model was pruned: it gets the masks, too."""

from typing import Any

import pytest
import torch
from test_prepare_pruning import model_of, train, zeros_of
from torch import nn

from returning import with_a_rank_that_returns
from stormtorch import BoundedDrift, GradientAveraging, ModelAveraging, Policy, prepare, prune
from stormtorch.collectives import Group
from stormtorch.transport.exchange import Transport


@pytest.mark.parametrize(
    "policy", [BoundedDrift(give_up_s=20.0), ModelAveraging(give_up_s=20.0), GradientAveraging(give_up_s=20.0)]
)
def test_a_process_that_joins_prunes_what_the_others_have_pruned(policy: Policy) -> None:
    def begin(transport: Transport, again: bool) -> tuple[Any, Any]:
        model = model_of()
        if again:
            with torch.no_grad():
                for each in model.parameters():
                    each.fill_(7.0)
        return prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy=policy, group=Group(transport))

    def first(model: nn.Module) -> None:
        prune(model, keep=0.25)

    def step(model: nn.Module, optimizer: Any) -> None:
        train(model, optimizer, 0, range(1))

    found = with_a_rank_that_returns(begin, step, zeros_of, first=first)
    assert float(found[0].float().mean()) > 0.5
    for zeros in found:
        assert torch.equal(zeros, found[0])
