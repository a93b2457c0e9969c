"""Memory of policies: views of vectors that survive a repartition."""

import pytest
import torch

from stormtorch.policies.memory import MemoryStore

pytestmark = pytest.mark.pure


def test_what_is_changed_in_place_is_remembered() -> None:
    store = MemoryStore(10)
    first = store.chunks(0, 2, 3)
    first["anchor"] = torch.ones(2, 3)
    first["anchor"].add_(1.0)
    assert store.vectors["anchor"].tolist() == [2.0] * 6 + [0.0] * 4


def test_a_default_is_written_once_and_given_as_a_view() -> None:
    memory = MemoryStore(4).chunks(0, 1, 4)
    memory.setdefault("speed", torch.zeros(1, 4)).add_(3.0)
    assert memory.setdefault("speed", torch.zeros(1, 4)).tolist() == [[3.0] * 4]


def test_chunks_know_only_what_was_written_for_them() -> None:
    store = MemoryStore(10)
    store.chunks(0, 2, 3)["anchor"] = torch.ones(2, 3)
    assert "anchor" in store.chunks(0, 1, 6)
    assert "anchor" not in store.chunks(6, 1, 4)
    assert list(store.chunks(6, 1, 4)) == []
    with pytest.raises(KeyError, match="begin_owner or begin_rank"):
        store.chunks(4, 1, 6)["anchor"]
    store.chunks(6, 1, 4)["anchor"] = torch.full((1, 4), 2.0)
    assert store.chunks(4, 3, 2)["anchor"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]


def test_parts_move_to_another_store() -> None:
    one, other = MemoryStore(6), MemoryStore(3)
    one.chunks(0, 1, 6)["a"] = torch.arange(6.0).view(1, -1)
    other.write(["a", "b"], 1, one.read(["a", "b"], 4, 2))
    assert other.vectors["a"].tolist() == [0.0, 4.0, 5.0]
    assert "b" in other.chunks(1, 1, 2) and "b" not in other.chunks(0, 1, 3)


def test_values_of_another_shape_are_refused() -> None:
    memory = MemoryStore(4).chunks(0, 1, 4)
    with pytest.raises(RuntimeError):
        memory["anchor"] = torch.zeros(1, 3)
    with pytest.raises(TypeError, match="cannot be deleted"):
        del memory["anchor"]


def test_what_was_loaded_counts_as_written() -> None:
    store, other = MemoryStore(6), MemoryStore(6)
    store.chunks(0, 2, 3)["speed"] = torch.ones(2, 3)
    other.load_state_dict(store.state_dict())
    assert "speed" in other.chunks(0, 2, 3)
    assert torch.equal(other.chunks(3, 1, 3)["speed"], torch.ones(1, 3))
