"""CIFAR-10 as bytes: its binary batches, the pickled ones, or packs, which need no more than half of the room.

A pack is lossless: colours as differences from green, each pixel as its difference from what LOCO-I predicts of its
neighbours, then LZMA. Decoding needs numpy and the standard library alone.
"""

import lzma
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stormtorch.checks import BadSetting, blaming, check_between
from stormtorch.tasks.data.images import CIFAR_HELD_OUT, CIFAR_SHAPE, CLASSES, Images, pickled_batch

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_NAMES = (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch")
_SIDE = CIFAR_SHAPE[1]
_PICTURE_BYTES = 3 * _SIDE * _SIDE
_MAGIC = b"stormtorch cifar10 1\n"
# A true set has 60,000.
_MOST_IMAGES = 100_000
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "pb": 0, "dict_size": 1 << 20}]


def open_cifar10(path: Path) -> Images:
    """The pictures of a folder or of a pack, as bytes; the same in every process.

    Args:
        path: A folder with data_batch_1.bin to test_batch.bin, one with all parts of a pack (*.pack), one with the
            Python version's batches, or a pack that is one file.

    Raises:
        BadSetting: They cannot be read; names `data`.
    """
    if path.is_file():
        return _whole(_read_packs([path]))
    if packs := sorted(path.glob("*.pack")):
        return _whole(_read_packs(packs))
    return _whole(_read_folder(path))


def pack_cifar10(folder: Path, out: Path, *, images: int | None = None, parts: int = 1) -> list[Path]:
    """Write pictures of a folder as packs, and return their paths.

    Args:
        folder: As `open_cifar10` takes it.
        out: The file to write.
        images: How many to learn from, the first of them; None is all. What is held out is always there.
        parts: With more than one, `out` gets a number before its suffix; all of them in one folder are the set.

    Raises:
        BadSetting: The folder cannot be read (`data`), or has fewer pictures (`images`) or too few (`parts`).
    """
    found = open_cifar10(folder)
    count = len(found.training) if images is None else images
    check_between("images", count, 1, len(found.training))
    check_between("parts", parts, 1, count)
    paths = []
    bounds = [count * part // parts for part in range(parts + 1)]
    for part, (first, last) in enumerate(pairwise(bounds)):
        judged = len(found.validation) if part == parts - 1 else 0
        held_out = found.validation[:judged], found.validation_labels[:judged]
        path = out if parts == 1 else out.with_name(f"{out.stem}-{part + 1}-of-{parts}{out.suffix}")
        _write_pack(path, part, parts, found.training[first:last], found.training_labels[first:last], *held_out)
        paths.append(path)
    return paths


# --- the batches as they are published --------------------------------------------------------------------------------

_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _whole(parts: list[_Part]) -> Images:
    tensors = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    return Images("CIFAR-10", *tensors)


def _read_folder(folder: Path) -> list[_Part]:
    inner = next(
        (folder / name for name in ("cifar-10-batches-bin", "cifar-10-batches-py") if (folder / name).is_dir()), folder
    )
    binary = (inner / f"{_NAMES[0]}.bin").exists()
    with blaming("data"):
        batches = [_binary_batch(inner / f"{name}.bin") if binary else pickled_batch(inner / name) for name in _NAMES]
    none = torch.empty(0, *CIFAR_SHAPE, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    held_out = tuple(tensor[:CIFAR_HELD_OUT] for tensor in batches[-1])
    return [*((*batch, *none) for batch in batches[:-1]), (*none, held_out[0], held_out[1])]


def _binary_batch(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A byte of label, then 3072 of red, green and blue, for each picture."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadSetting("data", f"must hold the batches of CIFAR-10: {path}: {error.strerror}") from error
    if not content or len(content) % (_PICTURE_BYTES + 1):
        raise BadSetting("data", f"holds no batch of CIFAR-10 in {path}: it has {len(content):,} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, _PICTURE_BYTES + 1)
    if rows[:, 0].max() >= CLASSES:
        raise BadSetting("data", f"holds no batch of CIFAR-10 in {path}: a label is {rows[:, 0].max()}")
    pictures = torch.from_numpy(rows[:, 1:].copy()).view(-1, *CIFAR_SHAPE)
    return pictures, torch.from_numpy(rows[:, 0].astype(np.int64))


# --- packs ------------------------------------------------------------------------------------------------------------


# Two numbers that say which part of how many it is, then two that say how many pictures are to learn and to judge from.
_COUNTS = 4


def _write_pack(path: Path, part: int, parts: int, *tensors: torch.Tensor) -> None:
    training, training_labels, validation, validation_labels = (tensor.numpy().astype(np.uint8) for tensor in tensors)
    pictures = np.concatenate([training, validation])
    content = b"".join(
        (
            np.array([part, parts, len(training), len(validation)], "<u4").tobytes(),
            np.concatenate([training_labels, validation_labels]).tobytes(),
            _residuals(_from_green(pictures)).transpose(1, 0, 2, 3).tobytes(),
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_MAGIC + lzma.compress(content, format=lzma.FORMAT_XZ, filters=_FILTERS))


def _read_packs(paths: list[Path]) -> list[_Part]:
    """All parts, in their order; any that is missing is an error, as figures of less would look like those of all."""
    found = [_read_pack(path) for path in paths]
    numbers = sorted((part, parts) for part, parts, _ in found)
    if numbers != [(part, len(found)) for part in range(len(found))]:
        told = ", ".join(f"{part + 1} of {parts}" for part, parts in numbers)
        raise BadSetting(
            "data", f"must hold all parts of one pack in {paths[0].parent}, and no other: there are {told}"
        )
    return [tensors for _, _, tensors in sorted(found, key=lambda entry: entry[0])]


def _read_pack(path: Path) -> tuple[int, int, _Part]:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise BadSetting("data", f"holds no pictures in {path}: it is no pack of CIFAR-10")
            with lzma.open(file) as packed:
                content = packed.read(_MOST_IMAGES * (_PICTURE_BYTES + 1))
    except OSError as error:
        raise BadSetting("data", f"cannot read {path}: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise BadSetting("data", f"holds no pictures in {path}: {error}") from error
    head = 4 * _COUNTS
    part, parts, learned, held_out = np.frombuffer(content[:head].ljust(head, b"\0"), "<u4").tolist()
    count = learned + held_out
    labels = np.frombuffer(content[head : head + count], np.uint8)
    if not count or len(content) != head + count * (_PICTURE_BYTES + 1) or labels.max() >= CLASSES:
        raise BadSetting("data", f"holds no pictures in {path}: it is damaged")
    planes = np.frombuffer(content, np.uint8, offset=head + count).reshape(3, count, _SIDE, _SIDE)
    pictures = torch.from_numpy(_to_colours(_from_residuals(planes)))
    targets = torch.from_numpy(labels.astype(np.int64))
    return part, parts, (pictures[:learned], targets[:learned], pictures[learned:], targets[learned:])


def _from_green(pictures: _Bytes) -> _Bytes:
    """(N, 3, height, width) of red, green, blue become green and the two differences from it, modulo 256."""
    red, green, blue = pictures[:, 0], pictures[:, 1], pictures[:, 2]
    return np.stack([green, red - green, blue - green], 1)


def _to_colours(planes: _Bytes) -> _Bytes:
    """What `_from_green` began with, of planes in front: (3, N, height, width) become (N, 3, height, width)."""
    green, red, blue = planes
    return np.stack([red + green, green, blue + green], 1)


def _predicted(left: _Bytes, above: _Bytes, corner: _Bytes) -> _Bytes:
    """LOCO-I: the smaller or the larger neighbour at an edge, else the plane through the three."""
    low, high = np.minimum(left, above), np.maximum(left, above)
    # In bytes: left + above - corner may leave them on the way, but lies within them wherever it is chosen.
    return np.where(corner >= high, low, np.where(corner <= low, high, left + above - corner))


def _residuals(planes: _Bytes) -> _Bytes:
    around = np.pad(planes, ((0, 0), (0, 0), (1, 0), (1, 0)))
    return planes - _predicted(around[:, :, 1:, :-1], around[:, :, :-1, 1:], around[:, :, :-1, :-1])


def _from_residuals(residuals: _Bytes) -> _Bytes:
    # Pixel by pixel, all pictures at once: pixels in front keep what a step touches together.
    inner = np.ascontiguousarray(residuals.transpose(2, 3, 0, 1))
    around = np.zeros((_SIDE + 1, _SIDE + 1, *inner.shape[2:]), np.uint8)
    for row in range(_SIDE):
        for column in range(_SIDE):
            predicted = _predicted(around[row + 1, column], around[row, column + 1], around[row, column])
            around[row + 1, column + 1] = inner[row, column] + predicted
    return around[1:, 1:].transpose(2, 3, 0, 1)
