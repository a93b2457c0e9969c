"""CIFAR-10 as bytes: read from binary batches, pickled batches, or packs, which are at most half as large.

A pack is lossless: it stores colours as differences from green, each pixel as the difference from what LOCO-I predicts
from its neighbours, compressed with LZMA. Decoding needs only numpy and the standard library.
"""

import lzma
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stormtorch.checks import BadSetting, blaming, check_between
from stormtorch_lab.tasks.data.images import CIFAR_HELD_OUT, CIFAR_SHAPE, CLASSES, Images, pickled_batch
from stormtorch_lab.tasks.data.split import Examples

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_NAMES = (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch")
_SIDE = CIFAR_SHAPE[1]
_IMAGE_BYTES = 3 * _SIDE * _SIDE
_MAGIC = b"stormtorch cifar10 1\n"
# A genuine set has 60,000.
_MOST_IMAGES = 100_000
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "pb": 0, "dict_size": 1 << 20}]


def open_cifar10(path: Path) -> Images:
    """Read the images of a folder or of a pack, as bytes.

    Args:
        path: A folder with data_batch_1.bin to test_batch.bin, with the Python version's batches, or with all parts of
            a pack (*.pack); or a pack that is a single file.

    Raises:
        BadSetting: The images cannot be read; the error names `data`.
    """
    if path.is_file():
        return _whole(_read_packs([path]))
    if packs := sorted(path.glob("*.pack")):
        return _whole(_read_packs(packs))
    return _whole(_read_folder(path))


def pack_cifar10(folder: Path, out: Path, *, images: int | None = None, parts: int = 1) -> list[Path]:
    """Write the images of a folder as packs, and return the paths of the packs.

    Args:
        folder: Any path that `open_cifar10` reads.
        out: File to write.
        images: Write only so many of the images to learn from, the first ones; None writes all. Held-out images are
            always written.
        parts: Number of packs. With more than one, `out` gets a number before its suffix, and the set is complete when
            all of them are in one folder.

    Raises:
        BadSetting: The folder cannot be read (the error names `data`), has fewer images than `images`, or fewer than
            `parts`.
    """
    found = open_cifar10(folder)
    count = len(found.training) if images is None else images
    check_between("images", count, 1, len(found.training))
    check_between("parts", parts, 1, count)
    paths = []
    bounds = [count * part // parts for part in range(parts + 1)]
    for part, (first, last) in enumerate(pairwise(bounds)):
        held_out = found.validation[: len(found.validation) if part == parts - 1 else 0]
        path = out if parts == 1 else out.with_name(f"{out.stem}-{part + 1}-of-{parts}{out.suffix}")
        _write_pack(path, part, parts, found.training[first:last], held_out)
        paths.append(path)
    return paths


# --- batches as they are published ------------------------------------------------------------------------------------

_Part = tuple[Examples, Examples]
"""Images to learn from, and held-out images."""


def _whole(parts: list[_Part]) -> Images:
    training, validation = (_joined(list(examples)) for examples in zip(*parts, strict=True))
    return Images(name="CIFAR-10", training=training, validation=validation)


def _joined(parts: list[Examples]) -> Examples:
    return Examples(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))


def _read_folder(folder: Path) -> list[_Part]:
    inner = next(
        (folder / name for name in ("cifar-10-batches-bin", "cifar-10-batches-py") if (folder / name).is_dir()), folder
    )
    binary = (inner / f"{_NAMES[0]}.bin").exists()
    with blaming("data"):
        batches = [_binary_batch(inner / f"{name}.bin") if binary else pickled_batch(inner / name) for name in _NAMES]
    return [(_joined(batches[:-1]), batches[-1][:CIFAR_HELD_OUT])]


def _binary_batch(path: Path) -> Examples:
    """Read a batch in which each image is one byte of label, then 3072 bytes of red, green and blue."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadSetting("data", f"must be a folder with the batches of CIFAR-10: {path}: {error.strerror}") from error
    if not content or len(content) % (_IMAGE_BYTES + 1):
        raise BadSetting("data", f"holds no batch of CIFAR-10 in {path}: it has {len(content):,} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, _IMAGE_BYTES + 1)
    if rows[:, 0].max() >= CLASSES:
        raise BadSetting("data", f"holds no batch of CIFAR-10 in {path}: a label is {rows[:, 0].max()}")
    images = torch.from_numpy(rows[:, 1:].copy()).view(-1, *CIFAR_SHAPE)
    return Examples(images, torch.from_numpy(rows[:, 0].astype(np.int64)))


# --- packs ------------------------------------------------------------------------------------------------------------


# A pack begins with four numbers: its part, the number of parts, and how many images are to learn from and held out.
_COUNTS = 4


def _write_pack(path: Path, part: int, parts: int, training: Examples, held_out: Examples) -> None:
    both = _joined([training, held_out])
    content = b"".join(
        (
            np.array([part, parts, len(training), len(held_out)], "<u4").tobytes(),
            both.targets.numpy().astype(np.uint8).tobytes(),
            _residuals(_from_green(both.inputs.numpy())).transpose(1, 0, 2, 3).tobytes(),
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_MAGIC + lzma.compress(content, format=lzma.FORMAT_XZ, filters=_FILTERS))


def _read_packs(paths: list[Path]) -> list[_Part]:
    """Read all parts in order. A missing part is an error: results on fewer images would look the same."""
    found = [_read_pack(path) for path in paths]
    numbers = sorted((part, parts) for part, parts, _ in found)
    if numbers != [(part, len(found)) for part in range(len(found))]:
        found_parts = ", ".join(f"{part + 1} of {parts}" for part, parts in numbers)
        raise BadSetting(
            "data", f"must hold all parts of one pack, and nothing else, in {paths[0].parent}: it has {found_parts}"
        )
    return [examples for _, _, examples in sorted(found, key=lambda entry: entry[0])]


def _read_pack(path: Path) -> tuple[int, int, _Part]:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise BadSetting("data", f"holds no images in {path}: it is no pack of CIFAR-10")
            with lzma.open(file) as packed:
                content = packed.read(_MOST_IMAGES * (_IMAGE_BYTES + 1))
    except OSError as error:
        raise BadSetting("data", f"cannot read {path}: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise BadSetting("data", f"holds no images in {path}: {error}") from error
    head = 4 * _COUNTS
    part, parts, learned, held_out = np.frombuffer(content[:head].ljust(head, b"\0"), "<u4").tolist()
    count = learned + held_out
    labels = np.frombuffer(content[head : head + count], np.uint8)
    if not count or len(content) != head + count * (_IMAGE_BYTES + 1) or labels.max() >= CLASSES:
        raise BadSetting("data", f"holds no images in {path}: it is damaged")
    planes = np.frombuffer(content, np.uint8, offset=head + count).reshape(3, count, _SIDE, _SIDE)
    images = torch.from_numpy(_to_colours(_from_residuals(planes)))
    both = Examples(images, torch.from_numpy(labels.astype(np.int64)))
    return part, parts, (both[:learned], both[learned:])


def _from_green(images: _Bytes) -> _Bytes:
    """Turn (N, 3, height, width) of red, green, blue into green and the two differences from it, modulo 256."""
    red, green, blue = images[:, 0], images[:, 1], images[:, 2]
    return np.stack([green, red - green, blue - green], 1)


def _to_colours(planes: _Bytes) -> _Bytes:
    """Undo `_from_green` for planes that come first: (3, N, height, width) become (N, 3, height, width)."""
    green, red, blue = planes
    return np.stack([red + green, green, blue + green], 1)


def _predicted(left: _Bytes, above: _Bytes, corner: _Bytes) -> _Bytes:
    """Predict as LOCO-I does: the smaller or the larger neighbour at an edge, else the plane through all three."""
    low, high = np.minimum(left, above), np.maximum(left, above)
    # left + above - corner may overflow a byte on the way; where it is chosen, the result fits into one.
    return np.where(corner >= high, low, np.where(corner <= low, high, left + above - corner))


def _residuals(planes: _Bytes) -> _Bytes:
    around = np.pad(planes, ((0, 0), (0, 0), (1, 0), (1, 0)))
    return planes - _predicted(around[:, :, 1:, :-1], around[:, :, :-1, 1:], around[:, :, :-1, :-1])


def _from_residuals(residuals: _Bytes) -> _Bytes:
    # Go pixel by pixel, for all images at once: with pixels as the first axes, each step touches adjacent memory.
    inner = np.ascontiguousarray(residuals.transpose(2, 3, 0, 1))
    around = np.zeros((_SIDE + 1, _SIDE + 1, *inner.shape[2:]), np.uint8)
    for row in range(_SIDE):
        for column in range(_SIDE):
            predicted = _predicted(around[row + 1, column], around[row, column + 1], around[row, column])
            around[row + 1, column + 1] = inner[row, column] + predicted
    return around[1:, 1:].transpose(2, 3, 0, 1)
