"""A pretrained model and its tokens: the tokenizer, and packed stories."""

import random
from pathlib import Path

import pytest
import torch

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.tokens import Tokenizer, open_stories, pack_stories
from stormtorch_lab.tasks.kinds import open_task
from stormtorch_lab.tasks.models.llama import Llama
from task_files import PIECES, write_stories, write_tokenizer

pytestmark = pytest.mark.pure


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


@pytest.mark.parametrize("file", ["stories15M.bin", "tokenizer.bin"])
def test_stories_that_are_cut_short_are_refused(tmp_path: Path, file: str) -> None:
    path = write_stories(tmp_path) / file
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadSetting, match=file) as caught:
        open_stories(tmp_path)
    assert caught.value.name == "data"
