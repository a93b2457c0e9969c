"""Text as bytes: the standard library, a file, or WikiText-2."""

import lzma
from pathlib import Path

import pytest

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.corpus import library_files, open_corpus
from stormtorch_lab.tasks.kinds import open_task
from task_files import write_wikitext

pytestmark = pytest.mark.pure


def test_the_corpus_is_the_same_every_time_and_holds_other_files_out() -> None:
    training, validation = library_files()
    assert not set(training) & set(validation)
    assert len(validation) == (len(training) + len(validation)) // 10
    assert not any(part in ("test", "tests", "site-packages") for path in training for part in path.parts[-3:])
    first, second = open_corpus(), open_corpus()
    assert first.to_json() == second.to_json()
    assert first.training.numel() > 1_000_000
    assert b"def __init__" in first.validation.numpy().tobytes()


def test_a_text_is_cut_into_what_is_learned_and_what_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(250)) * 1000
    path = tmp_path / "text.bin"
    path.write_bytes(content)
    corpus = open_corpus(path)
    assert corpus.training.numpy().tobytes() + corpus.validation.numpy().tobytes() == content
    assert corpus.validation.numel() == 25_000


def test_a_text_that_is_missing_or_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"too short")
    for name, problem in (("missing", "cannot read"), ("short", "has 9")):
        with pytest.raises(BadSetting, match=problem) as caught:
            open_corpus(tmp_path / name)
        assert caught.value.name == "text"


def test_wikitext_may_be_compressed(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    plain = open_task("llama", tmp_path).to_json()
    for path in list(tmp_path.iterdir()):
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    assert open_task("llama", tmp_path).to_json() == plain
