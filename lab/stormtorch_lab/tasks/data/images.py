"""Images to recognize: scikit-learn's handwritten digits, or CIFAR-10 from a folder."""

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.split import Examples, Split

CLASSES = 10
_DIGITS_HELD_OUT = 297
# Enough to judge by: all ten thousand would take longer than the training steps between two evaluations.
CIFAR_HELD_OUT = 2000
CIFAR_SHAPE = (3, 32, 32)
# A genuine batch has 31 MB.
_MOST_PICKLE_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Images(Split[Examples]):
    """Images, (N, channels, height, width), and their labels, (N).

    Images are uint8 as they were published, or float32 normalized to channels of mean 0 and deviation 1.
    """

    def to_json(self) -> dict[str, object]:
        """Describe the images."""
        return super().to_json() | {
            "training_images": len(self.training),
            "validation_images": len(self.validation),
            "shape": list(self.training.inputs.shape[1:]),
        }


def open_images(cifar10: Path | None = None) -> Images:
    """Read CIFAR-10 from a folder, or (None) the digits, normalized in float32.

    Raises:
        BadSetting: The images cannot be read; the error names `cifar10`.
    """
    return _digits() if cifar10 is None else _cifar10(cifar10)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise BadSetting(
            "cifar10",
            "must name a folder: the digits come with scikit-learn, which is not installed here "
            "(pip install scikit-learn, or the extra stormtorch-lab[train])",
        ) from error
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1)
    labels = torch.from_numpy(found.target).long()
    # Neighbours were written by the same person: shuffle, so that both parts have digits of all writers.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return _normalized("digits", images[order], labels[order], _DIGITS_HELD_OUT)


def _cifar10(folder: Path) -> Images:
    inner = folder / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else folder
    batches = [pickled_batch(folder / name) for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch")]
    images = torch.cat([batch.inputs for batch in batches])
    labels = torch.cat([batch.targets for batch in batches])
    tested = len(batches[-1])
    kept = len(labels) - max(tested - CIFAR_HELD_OUT, 0)
    return _normalized("CIFAR-10", images[:kept].float(), labels[:kept], min(tested, CIFAR_HELD_OUT))


def _normalized(name: str, images: torch.Tensor, labels: torch.Tensor, held_out: int) -> Images:
    mean, deviation = (each(images[:-held_out], (0, 2, 3)).view(1, -1, 1, 1) for each in (torch.mean, torch.std))
    examples = Examples((images - mean) / deviation.clamp(min=1e-6), labels)
    return Images(name=name, training=examples[:-held_out], validation=examples[-held_out:])


# --- CIFAR-10's files are pickles, and a careless reader runs whatever a pickle names ---------------------------------


class _Dtype:
    """Stand-in for numpy's dtype that keeps its first argument."""

    def __init__(self, kind: object, *_: object) -> None:
        self.kind = kind

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and the like: a byte has none."""


class _Array:
    """Stand-in for numpy's array that keeps its state."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def bytes_of(self, width: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return the array if it holds bytes in rows of that width; raise ValueError otherwise."""
        _version, shape, dtype, by_columns, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.kind not in ("u1", b"u1") or by_columns:
            raise ValueError("its data are not rows of bytes")
        if len(shape) != 2 or shape[1] != width or not isinstance(content, bytes) or len(content) != math.prod(shape):
            raise ValueError(f"its data are not rows of {width} bytes")
        return np.frombuffer(content, np.uint8).reshape(-1, width)


def _latin1(text: str, _encoding: str) -> bytes:
    """Encode text as bytes: old pickle protocols have no bytes, so Python 3 writes them as text."""
    return text.encode("latin1")


class _BatchReader(pickle.Unpickler):
    """Unpickler of lists, numbers, bytes and arrays of bytes. Nothing that a file names is imported or called."""

    _KNOWN = {  # noqa: RUF012  # typeshed's Unpickler is not meant for class variables
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _latin1,
    }

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs") from None


def pickled_batch(path: Path) -> Examples:
    """Read one batch of the Python version: images as bytes, and their labels.

    Raises:
        BadSetting: The file cannot be read, or is no batch; the error names `cifar10`.
    """
    try:
        if path.stat().st_size > _MOST_PICKLE_BYTES:
            raise BadSetting("cifar10", f"holds no batch of CIFAR-10 in {path}: it is too large")
        with path.open("rb") as file:
            batch = _BatchReader(file).load()
    except BadSetting:
        raise
    except OSError as error:
        raise BadSetting(
            "cifar10", f"must be a folder with the Python version's batches: {path}: {error.strerror}"
        ) from error
    except Exception as error:  # the file may come from anywhere, and unpickling it may raise anything
        raise BadSetting("cifar10", f"holds no batch of CIFAR-10 in {path}: {error}") from error
    try:
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        rows = fields["data"].bytes_of(math.prod(CIFAR_SHAPE))
        labels = torch.tensor(fields["labels"], dtype=torch.int64)
        if labels.shape != (len(rows),) or not len(rows) or not 0 <= int(labels.min()) <= int(labels.max()) < CLASSES:
            raise ValueError(f"its labels are not one of 0 to {CLASSES - 1} for each image")
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadSetting("cifar10", f"holds no batch of CIFAR-10 in {path}: {error}") from error
    return Examples(torch.from_numpy(rows.copy()).view(-1, *CIFAR_SHAPE), labels)
