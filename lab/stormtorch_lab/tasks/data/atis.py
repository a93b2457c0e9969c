"""ATIS, read from a folder: questions about flights in which each word has a slot."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.batches import PADDING
from stormtorch_lab.tasks.data.split import Examples, Split

_UNKNOWN = 0
# A word that occurs only once in training counts as unknown, so that the model learns what to do with unknown words.
_LEAST_TIMES = 2
_MOST_WORDS = 1000


@dataclass(frozen=True, kw_only=True)
class Atis(Split[Examples]):
    """Sentences as numbers, padded to the longest.

    Inputs are words, (N, T) int64: 0 is an unknown word, or padding. Targets are slots, (N, T) int64: `PADDING` behind
    the last word.
    """

    words: int
    """Number of different words, including the unknown one."""
    slots: int
    """Number of different slots."""

    def to_json(self) -> dict[str, object]:
        """Describe the sentences."""
        return super().to_json() | {
            "training_sentences": len(self.training),
            "validation_sentences": len(self.validation),
            "words": self.words,
            "slots": self.slots,
        }


def open_atis(folder: Path) -> Atis:
    """Read the sentences of the folders `train` and `valid`, each of which holds seq.in and seq.out.

    Raises:
        BadSetting: The files cannot be read; the error names `data`.
    """
    training, validation = (_sentences(folder / part) for part in ("train", "valid"))
    times = Counter(word for words, _ in training for word in words)
    numbers = {word: 1 + at for at, word in enumerate(sorted(word for word in times if times[word] >= _LEAST_TIMES))}
    # Slots of both parts: one that training does not have counts as not recognized.
    names = sorted({slot for _, slots in training + validation for slot in slots})
    slots = {name: at for at, name in enumerate(names)}
    return Atis(
        name="ATIS",
        training=_numbered(training, numbers, slots),
        validation=_numbered(validation, numbers, slots),
        words=1 + len(numbers),
        slots=len(slots),
    )


_Sentence = tuple[list[str], list[str]]


def _sentences(folder: Path) -> list[_Sentence]:
    try:
        words, slots = ((folder / name).read_text("utf-8").splitlines() for name in ("seq.in", "seq.out"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting("data", f"must be a folder with ATIS (train/seq.in and so on): {error}") from error
    if len(words) != len(slots):
        raise BadSetting("data", f"has {len(words):,} sentences but slots for {len(slots):,} in {folder}")
    found = [(word.split(), slot.split()) for word, slot in zip(words, slots, strict=True)]
    for line, (word, slot) in enumerate(found, 1):
        if len(word) != len(slot) or not 1 <= len(word) <= _MOST_WORDS:
            raise BadSetting("data", f"has {len(word)} words and {len(slot)} slots in line {line} of {folder}")
    if not found:
        raise BadSetting("data", f"has no sentence in {folder}")
    return found


def _numbered(sentences: list[_Sentence], words: dict[str, int], slots: dict[str, int]) -> Examples:
    shape = len(sentences), max(len(sentence) for sentence, _ in sentences)
    found_words, found_slots = torch.full(shape, _UNKNOWN), torch.full(shape, PADDING)
    for row, (sentence, named) in enumerate(sentences):
        found_words[row, : len(sentence)] = torch.tensor([words.get(word, _UNKNOWN) for word in sentence])
        found_slots[row, : len(sentence)] = torch.tensor([slots[slot] for slot in named])
    return Examples(found_words, found_slots)
