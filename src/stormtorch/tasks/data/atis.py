"""Questions about flights, each word with its slot: ATIS, from a folder."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from stormtorch.checks import BadSetting

PADDING = -1
"""The slot behind the last word, which nothing is asked about."""
_UNKNOWN = 0
# Words that training has only once are unknown, so that the unknown is something it knows.
_LEAST_TIMES = 2
_MOST_WORDS = 1000


@dataclass(frozen=True)
class Utterances:
    """Sentences as numbers, padded to the longest."""

    words: torch.Tensor
    """int64, (N, T); 0 is an unknown word, or none."""
    slots: torch.Tensor
    """int64, (N, T); `PADDING` behind the last word."""
    lengths: torch.Tensor
    """int64, (N)."""


@dataclass(frozen=True)
class Atis:
    """Sentences to learn from, and sentences held out to judge by."""

    training: Utterances
    validation: Utterances
    words: int
    """How many numbers of words there are, with that of the unknown."""
    slots: int

    def to_json(self) -> dict[str, object]:
        """What they were."""
        return {
            "name": "ATIS",
            "training_sentences": len(self.training.words),
            "validation_sentences": len(self.validation.words),
            "words": self.words,
            "slots": self.slots,
        }


def open_atis(folder: Path) -> Atis:
    """Sentences of the folders `train` and `valid`, each with seq.in and seq.out; the same in every process.

    Raises:
        BadSetting: They cannot be read; names `data`.
    """
    training, validation = (_sentences(folder / part) for part in ("train", "valid"))
    times = Counter(word for words, _ in training for word in words)
    numbers = {word: 1 + at for at, word in enumerate(sorted(word for word in times if times[word] >= _LEAST_TIMES))}
    # Of both parts: a slot that training does not have counts as one that was not recognized.
    names = sorted({slot for _, slots in training + validation for slot in slots})
    slots = {name: at for at, name in enumerate(names)}
    return Atis(
        _numbered(training, numbers, slots), _numbered(validation, numbers, slots), 1 + len(numbers), len(slots)
    )


_Sentence = tuple[list[str], list[str]]


def _sentences(folder: Path) -> list[_Sentence]:
    try:
        words, slots = ((folder / name).read_text("utf-8").splitlines() for name in ("seq.in", "seq.out"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting("data", f"must hold ATIS, train/seq.in and so on: {error}") from error
    if len(words) != len(slots):
        raise BadSetting("data", f"has {len(words):,} sentences and slots of {len(slots):,} in {folder}")
    found = [(word.split(), slot.split()) for word, slot in zip(words, slots, strict=True)]
    for line, (word, slot) in enumerate(found, 1):
        if len(word) != len(slot) or not 1 <= len(word) <= _MOST_WORDS:
            raise BadSetting("data", f"has {len(word)} words and {len(slot)} slots in line {line} of {folder}")
    if not found:
        raise BadSetting("data", f"has no sentence in {folder}")
    return found


def _numbered(sentences: list[_Sentence], words: dict[str, int], slots: dict[str, int]) -> Utterances:
    lengths = torch.tensor([len(sentence) for sentence, _ in sentences])
    shape = len(sentences), int(lengths.max())
    found_words, found_slots = torch.full(shape, _UNKNOWN), torch.full(shape, PADDING)
    for row, (sentence, named) in enumerate(sentences):
        found_words[row, : len(sentence)] = torch.tensor([words.get(word, _UNKNOWN) for word in sentence])
        found_slots[row, : len(sentence)] = torch.tensor([slots[slot] for slot in named])
    return Utterances(found_words, found_slots, lengths)
