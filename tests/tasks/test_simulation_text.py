"""Text as virtual workers learn it: tokens, a checkpoint that knows them, and sentences whose words have slots."""

import lzma
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.checks import BadSetting
from stormtorch.tasks.batches import PADDING, Batch
from stormtorch.tasks.data.checkpoints import read_checkpoint
from stormtorch.tasks.data.tokens import Tokenizer, open_stories, pack_stories
from stormtorch.tasks.kinds import open_task
from stormtorch.tasks.models.llama import Llama
from task_files import (
    HEADS,
    LAYERS,
    PIECES,
    WIDTH,
    tiny,
    write_atis,
    write_checkpoint,
    write_stories,
    write_tokenizer,
    write_wikitext,
)

pytestmark = pytest.mark.pure


# --- tokens and checkpoints -------------------------------------------------------------------------------------------


def test_words_are_encoded_as_the_whole_text_would_be_and_decode_to_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.bin")
    tokenizer = Tokenizer.read(tmp_path / "tokenizer.bin", len(PIECES))
    chooser = random.Random(0)
    for _ in range(50):
        text = "".join(chooser.choices(" thean.\n\u00e2\u20a4x", k=chooser.randint(1, 40)))
        tokens = tokenizer.encode(text)
        assert tokens == tokenizer.merged(f" {text}")
        assert tokenizer.decode(tokens) == f" {text}"
    assert tokenizer.encode("") == []
    assert [PIECES[token] for token in tokenizer.encode("the land")] == [b" the", b" ", b"l", b"and"]


def test_a_character_without_a_token_becomes_bytes_that_merge_with_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.bin")
    tokenizer = Tokenizer.read(tmp_path / "tokenizer.bin", len(PIECES))
    # The first byte of the lira is called like a character that has a token, alone and behind a space.
    assert tokenizer.encode("\u20a4") == [259, *(3 + byte for byte in "\u20a4".encode())]
    assert [PIECES[token] for token in tokenizer.encode("\u00e2")] == [b" \xc3\xa2"]


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


def test_packed_stories_are_the_same_tokens_and_weights_as_float16(tmp_path: Path) -> None:
    folder = write_stories(tmp_path / "plain")
    pack_stories(folder, folder, tmp_path / "stories.pt")
    before, after = open_stories(folder), open_stories(tmp_path / "stories.pt")
    assert after.size == before.size
    assert torch.equal(after.training, before.training)
    assert torch.equal(after.validation, before.validation)
    assert after.state.keys() == before.state.keys()
    assert all(torch.equal(after.state[name], weight.half().float()) for name, weight in before.state.items())
    assert (before.to_json()["weights"], after.to_json()["weights"]) == ("float32", "float16")
    assert open_task("stories15m", tmp_path / "stories.pt", context=12).evaluate(Llama(after.size))[0] > 0


def test_wikitext_may_be_compressed(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    plain = open_task("llama", tmp_path).to_json()
    for path in list(tmp_path.iterdir()):
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    assert open_task("llama", tmp_path).to_json() == plain


# --- sentences --------------------------------------------------------------------------------------------------------


def test_what_is_behind_a_sentence_does_not_count(tmp_path: Path) -> None:
    task = tiny("lstm", tmp_path)
    model = task.model(0)
    batch = task.batches(0, 0, 4, 0, 4)
    words, slots = batch.inputs[0], batch.targets[0]
    assert bool((slots == PADDING).any())
    scores = model(words).log_softmax(-1)
    places = [(row, at) for row in range(len(words)) for at in range(words.shape[1]) if slots[row, at] != PADDING]
    expected = -sum(float(scores[row, at, slots[row, at]].detach()) for row, at in places) / len(places)
    assert float(task.loss(model, Batch(words, slots)).detach()) == pytest.approx(expected, rel=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["stories15M.bin", "tokenizer.bin"])
def test_stories_that_are_cut_short_are_refused(tmp_path: Path, file: str) -> None:
    path = write_stories(tmp_path) / file
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadSetting, match=file) as caught:
        open_stories(tmp_path)
    assert caught.value.name == "data"


def test_a_checkpoint_that_shares_keys_among_heads_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.bin", key_heads=1)
    with pytest.raises(BadSetting, match="shares keys among heads"):
        read_checkpoint(tmp_path / "model.bin")


def test_sentences_and_slots_that_do_not_match_are_refused(tmp_path: Path) -> None:
    path = write_atis(tmp_path) / "train" / "seq.out"
    path.write_text(path.read_text().replace("O", "O O", 1))
    with pytest.raises(BadSetting, match=r"words and \d+ slots in line") as caught:
        open_task("lstm", tmp_path)
    assert caught.value.name == "data"
