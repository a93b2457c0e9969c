"""Small data files in the layouts of the tasks, and tasks that use them."""

import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stormtorch_lab.tasks.kinds import open_task
from stormtorch_lab.tasks.task import Task

WIDTH, HIDDEN, LAYERS, HEADS, CONTEXT = 16, 24, 2, 2, 32
# Unknown, begin, end; bytes; then characters and what they merge to, the longer the later.
LETTERS = [bytes([byte]) for byte in b" abcdehilnorstuwy.,=<>@-"]
MERGED = [
    b"th",
    b"he",
    b"the",
    b" t",
    b" the",
    b"in",
    b"  ",
    b"er",
    b" a",
    b"an",
    b"and",
    b" and",
    b"\xc3\xa2",
    b" \xc3\xa2",
]
PIECES = [
    b"<unk>",
    b"\n<s>\n",
    b"\n</s>\n",
    *(chr(byte).encode() for byte in range(256)),
    *LETTERS,
    *MERGED,
    b"\xc3\xa2",
    b" \xc3\xa2",
]


def write_tokenizer(path: Path) -> None:
    scores = [-float(number) for number in range(len(PIECES))]
    rows = (struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, PIECES, strict=True))
    path.write_bytes(struct.pack("<i", max(map(len, PIECES))) + b"".join(rows))


def write_checkpoint(path: Path, *, tied: bool = True, heads: int = HEADS, key_heads: int = HEADS) -> dict[str, Any]:
    """Random weights, and the same by the names that llama2.c gives them."""
    random_numbers = np.random.default_rng(0)
    vocabulary = len(PIECES)
    shapes = {
        "embedding": (vocabulary, WIDTH),
        "attention_norm": (LAYERS, WIDTH),
        "wq": (LAYERS, WIDTH, WIDTH),
        "wk": (LAYERS, WIDTH, WIDTH),
        "wv": (LAYERS, WIDTH, WIDTH),
        "wo": (LAYERS, WIDTH, WIDTH),
        "feed_norm": (LAYERS, WIDTH),
        "w1": (LAYERS, HIDDEN, WIDTH),
        "w2": (LAYERS, WIDTH, HIDDEN),
        "w3": (LAYERS, HIDDEN, WIDTH),
        "norm": (WIDTH,),
        "turns": (2, CONTEXT, WIDTH // heads // 2),
    } | ({} if tied else {"classifier": (vocabulary, WIDTH)})
    weights = {name: random_numbers.normal(0, 0.5, shape).astype("<f4") for name, shape in shapes.items()}
    header = WIDTH, HIDDEN, LAYERS, heads, key_heads, vocabulary if tied else -vocabulary, CONTEXT
    path.write_bytes(struct.pack("<7i", *header) + b"".join(each.tobytes() for each in weights.values()))
    return {name: torch.from_numpy(each) for name, each in weights.items()}


def write_wikitext(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["the", "and", "heron", "unit", "th\u00e9", "a", "in", "\u20a4", "\n", "=", "<unk>", "@-@"]
    for seed, (part, count) in enumerate((("train", 9000), ("valid", 8000))):
        chosen = random.Random(seed).choices(words, k=count)
        (folder / f"wiki.{part}.tokens").write_text(" ".join(chosen), encoding="utf-8")


def write_stories(folder: Path) -> Path:
    write_wikitext(folder)
    write_checkpoint(folder / "stories15M.bin")
    write_tokenizer(folder / "tokenizer.bin")
    return folder


def write_cifar10(folder: Path, images: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random_numbers = np.random.default_rng(1)
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        rows = random_numbers.integers(0, 256, (images, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(folder / f"{name}.bin")
    return folder


def write_atis(folder: Path, sentences: int = 40) -> Path:
    slots = {"fly": "O", "to": "O", "from": "O", "boston": "B-city", "dallas": "B-city", "monday": "B-day"}
    for seed, part in enumerate(("train", "valid", "test")):
        chooser = random.Random(seed)
        lines = [chooser.choices(sorted(slots), k=chooser.randint(1, 9)) for _ in range(sentences)]
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "seq.in").write_text("\n".join(" ".join(line) for line in lines) + "\n")
        (folder / part / "seq.out").write_text(
            "\n".join(" ".join(slots[word] for word in line) for line in lines) + "\n"
        )
    return folder


def tiny(name: str, folder: Path) -> Task:
    """The task of that name, of files made here."""
    if name == "llama":
        write_wikitext(folder)
        return open_task(name, folder, batch=3, context=16, width=32, layers=2)
    if name == "stories15m":
        return open_task(name, write_stories(folder), batch=2, context=12)
    if name == "lstm":
        return open_task(name, write_atis(folder), batch=3)
    return open_task(name, write_cifar10(folder), batch=2)


def write_cifar10_batches(folder: Path, images_per_batch: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        batch = {
            b"batch_label": name.encode(),
            b"labels": random.integers(0, 10, images_per_batch).tolist(),
            b"data": random.integers(0, 256, (images_per_batch, 3072), dtype=np.uint8),
            b"filenames": [b"a.png"] * images_per_batch,
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
