"""Checkpoints in the layout of llama2.c."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.checkpoints import read_checkpoint
from stormtorch_lab.tasks.models.llama import Llama
from task_files import HEADS, LAYERS, WIDTH, write_checkpoint

pytestmark = pytest.mark.pure


def reference(weights: dict[str, Any], tokens: list[int], heads: int) -> torch.Tensor:
    """llama2.c's forward, token by token and head by head, with pairs (2i, 2i + 1) turned together."""

    def norm(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vector / (vector.square().mean() + 1e-5).sqrt() * weight

    def turned(vector: torch.Tensor, place: int) -> torch.Tensor:
        out = vector.clone()
        size = WIDTH // heads
        for at in range(0, WIDTH, 2):
            angle = torch.tensor(place * 10_000.0 ** (-(at % size) / size))
            out[at] = vector[at] * angle.cos() - vector[at + 1] * angle.sin()
            out[at + 1] = vector[at] * angle.sin() + vector[at + 1] * angle.cos()
        return out

    hidden = [weights["embedding"][token] for token in tokens]
    for layer in range(LAYERS):
        normed = [norm(each, weights["attention_norm"][layer]) for each in hidden]
        queries = [turned(weights["wq"][layer] @ each, place) for place, each in enumerate(normed)]
        keys = [turned(weights["wk"][layer] @ each, place) for place, each in enumerate(normed)]
        values = [weights["wv"][layer] @ each for each in normed]
        for place in range(len(tokens)):
            seen = []
            for head in range(heads):
                own = slice(head * WIDTH // heads, (head + 1) * WIDTH // heads)
                scores = torch.stack([queries[place][own] @ keys[past][own] for past in range(place + 1)])
                shares = (scores / (WIDTH // heads) ** 0.5).softmax(0)
                seen.append(sum(share * values[past][own] for past, share in enumerate(shares)))
            hidden[place] = hidden[place] + weights["wo"][layer] @ torch.cat(seen)
        for place, each in enumerate(hidden):
            inner = norm(each, weights["feed_norm"][layer])
            gate = nn.functional.silu(weights["w1"][layer] @ inner) * (weights["w3"][layer] @ inner)
            hidden[place] = each + weights["w2"][layer] @ gate
    writer = weights.get("classifier", weights["embedding"])
    return torch.stack([writer @ norm(each, weights["norm"]) for each in hidden])


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_llama2_c_scores_as_its_own_program_would(tmp_path: Path, tied: bool) -> None:
    weights = write_checkpoint(tmp_path / "model.bin", tied=tied)
    size, state = read_checkpoint(tmp_path / "model.bin")
    model = Llama(size)
    model.load_state_dict(state)
    tokens = [1, 260, 270, 265, 280, 3]
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.tensor([tokens]))[0], reference(weights, tokens, HEADS), rtol=1e-3, atol=1e-4
        )


def test_a_checkpoint_that_shares_keys_among_heads_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.bin", key_heads=1)
    with pytest.raises(BadSetting, match="shares keys among heads"):
        read_checkpoint(tmp_path / "model.bin")
