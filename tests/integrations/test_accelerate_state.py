"""State dicts of models prepared inside Accelerate."""

from typing import Any

import pytest
import torch
from conftest import local_world

from stormtorch import prepare
from stormtorch.collectives import Group
from stormtorch.integrations import accelerate
from stormtorch.udp.udp import UdpTransport


@pytest.mark.pure
def test_only_tensors_in_a_bucket_are_copied_for_accelerate() -> None:
    bucket, frozen = torch.arange(10.0), torch.ones(1000)
    state: dict[str, Any] = {
        "model.a": bucket[:4],
        "model.b": bucket[4:8].view(2, 2),
        "model.tied": bucket[:4],
        "model.frozen": frozen,
        "model.steps": 7,
        "other": bucket[8:],
    }
    before = dict(state)
    accelerate._separate(torch.nn.Module(), state, "model.", None)
    assert [name for name in state if state[name] is before[name]] == ["model.frozen", "model.steps", "other"]
    assert state["model.a"] is state["model.tied"]
    assert all(torch.equal(state[name], before[name]) for name in ("model.a", "model.b"))
    memory = {state[name].untyped_storage().data_ptr() for name in ("model.a", "model.b", "model.frozen", "other")}
    assert len(memory) == 4


def test_a_prepared_model_saves_every_parameter_in_memory_of_its_own() -> None:
    def work(transport: UdpTransport) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        prepare(model, optimizer, group=Group(transport))
        plain = model.state_dict()
        model.register_state_dict_post_hook(accelerate._separate)  # type: ignore[no-untyped-call]  # torch's
        saved = model.state_dict()
        copied = [name for name in saved if saved[name].data_ptr() != plain[name].data_ptr()]
        assert copied == ["0.weight", "0.bias"]
        assert saved["0.weight"].untyped_storage().nbytes() == 64

    local_world(2, work)
