"""Deterministic simulations: torch is asked for the same bits while one runs, and has its settings back after it."""

import os
from typing import Any

import pytest
import torch

from stormtorch_lab.simulation.same_bits import same_bits

pytestmark = pytest.mark.pure


def test_torch_is_deterministic_meanwhile_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    from torch._inductor import config

    with pytest.raises(KeyboardInterrupt), same_bits(True):
        assert torch.are_deterministic_algorithms_enabled() and config.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise KeyboardInterrupt
    assert not torch.are_deterministic_algorithms_enabled() and not config.deterministic
    memory: Any = torch.utils.deterministic
    assert memory.fill_uninitialized_memory


def test_who_does_not_ask_keeps_what_torch_does() -> None:
    with same_bits(False):
        assert not torch.are_deterministic_algorithms_enabled()
