"""Text to learn from, as bytes: the source of Python's own standard library, a file, or WikiText-2's folder."""

import hashlib
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from stormtorch.checks import BadSetting

# Tests and what is no prose of programmers: tables of characters, and pages made from documentation.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
_MOST_BYTES = 16 << 20
# Of files, or of the end of a single one.
_HELD_OUT_EVERY = 10
_LEAST_BYTES = 20_000


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and bytes held out to judge by."""

    name: str
    training: torch.Tensor
    """uint8, one dimension."""
    validation: torch.Tensor
    """The same of other files, or of another part of the file."""

    def to_json(self) -> dict[str, object]:
        """What it was, so that a figure can be told apart from that of another corpus."""
        digest = hashlib.sha256(self.training.numpy().tobytes() + self.validation.numpy().tobytes())
        return {
            "name": self.name,
            "training_bytes": self.training.numel(),
            "validation_bytes": self.validation.numel(),
            "sha256": digest.hexdigest()[:16],
        }


def open_corpus(text: Path | None = None) -> Corpus:
    """The corpus of a file, of a folder of WikiText-2, or of the standard library; the same in every process.

    Raises:
        BadSetting: It cannot be read or is too small; names `text`.
    """
    if text is None:
        return _from_library()
    return _from_wikitext(text) if text.is_dir() else _from_file(text)


def read_wikitext(folder: Path, part: str) -> bytes:
    """WikiText-2's "train", "valid" or "test": wiki.train.tokens of that folder, or wiki.train.tokens.xz.

    Raises:
        BadSetting: It cannot be read; names `text`.
    """
    plain = folder / f"wiki.{part}.tokens"
    packed = plain.with_name(f"{plain.name}.xz")
    try:
        if not plain.exists() and packed.exists():
            with lzma.open(packed) as file:
                return file.read(_MOST_BYTES)
        with plain.open("rb") as file:
            return file.read(_MOST_BYTES)
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise BadSetting(
            "text", f"must hold WikiText-2: {plain}: {getattr(error, 'strerror', None) or error}"
        ) from error


def library_files(root: Path | None = None) -> tuple[list[Path], list[Path]]:
    """The standard library's source files to learn from, and those held out: every tenth, by name."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    return [path for path in files if path not in set(held_out)], held_out


def _from_library() -> Corpus:
    training, validation = library_files()
    try:
        parts = [b"".join(path.read_bytes() for path in paths) for paths in (training, validation)]
    except OSError as error:
        raise BadSetting("text", f"must name a file here: the standard library cannot be read ({error})") from error
    if min(map(len, parts)) < _LEAST_BYTES:
        raise BadSetting("text", "must name a file here: the standard library's source is not installed")
    return Corpus("Python's standard library", *(_tensor(part) for part in parts))


def _from_wikitext(folder: Path) -> Corpus:
    parts = [read_wikitext(folder, part) for part in ("train", "valid")]
    if min(map(len, parts)) < _LEAST_BYTES:
        raise BadSetting("text", f"must have at least {_LEAST_BYTES:,} bytes in each part, {folder} has fewer")
    return Corpus("WikiText-2", *(_tensor(part) for part in parts))


def _from_file(path: Path) -> Corpus:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise BadSetting("text", f"cannot read {path}: {error.strerror}") from error
    if len(content) < _LEAST_BYTES * _HELD_OUT_EVERY:
        least = _LEAST_BYTES * _HELD_OUT_EVERY
        raise BadSetting("text", f"must have at least {least:,} bytes to learn from, {path} has {len(content):,}")
    end = len(content) - len(content) // _HELD_OUT_EVERY
    return Corpus(path.name, _tensor(content[:end]), _tensor(content[end:]))


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content[:_MOST_BYTES]), dtype=torch.uint8)
