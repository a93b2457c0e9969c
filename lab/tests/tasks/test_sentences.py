"""Sentences whose words have slots."""

from pathlib import Path

import pytest

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.batches import PADDING, Batch
from stormtorch_lab.tasks.kinds import open_task
from task_files import tiny, write_atis

pytestmark = pytest.mark.pure


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


def test_sentences_and_slots_that_do_not_match_are_refused(tmp_path: Path) -> None:
    path = write_atis(tmp_path) / "train" / "seq.out"
    path.write_text(path.read_text().replace("O", "O O", 1))
    with pytest.raises(BadSetting, match=r"words and \d+ slots in line") as caught:
        open_task("lstm", tmp_path)
    assert caught.value.name == "data"
