"""Text as bytes: the source of Python's standard library, a file, or a folder that holds WikiText-2."""

import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.data.split import Split

# Folders left out: tests, and what programmers did not write as prose (tables of characters, generated documentation).
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
_MOST_BYTES = 16 << 20
# One file in ten is held out, or the last tenth of a single file.
_HELD_OUT_EVERY = 10
_LEAST_BYTES = 20_000


@dataclass(frozen=True, kw_only=True)
class Corpus(Split[torch.Tensor]):
    """Bytes of text: uint8, one dimension. The held-out part is from other files, or from the end of the same one."""

    def to_json(self) -> dict[str, object]:
        """Describe the text."""
        return super().to_json() | {
            "training_bytes": self.training.numel(),
            "validation_bytes": self.validation.numel(),
        }


def open_corpus(text: Path | None = None) -> Corpus:
    """Read a file, a folder that holds WikiText-2, or (None) the source of Python's standard library.

    Raises:
        BadSetting: The text cannot be read or is too small; the error names `text`.
    """
    if text is None:
        return _from_library()
    return _from_wikitext(text) if text.is_dir() else _from_file(text)


def read_wikitext(folder: Path, part: str) -> bytes:
    """Read the part "train", "valid" or "test" of WikiText-2: wiki.train.tokens, or wiki.train.tokens.xz.

    Raises:
        BadSetting: The file cannot be read; the error names `text`.
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
            "text", f"must be a folder with WikiText-2: {plain}: {getattr(error, 'strerror', None) or error}"
        ) from error


def library_files(root: Path | None = None) -> tuple[list[Path], list[Path]]:
    """List the standard library's source files to learn from, and those held out: every tenth by name."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    return [path for path in files if path not in set(held_out)], held_out


def _from_library() -> Corpus:
    training, validation = library_files()
    try:
        parts = [b"".join(path.read_bytes() for path in paths) for paths in (training, validation)]
    except OSError as error:
        raise BadSetting(
            "text", f"must name a file: the source of the standard library cannot be read here ({error})"
        ) from error
    if min(map(len, parts)) < _LEAST_BYTES:
        raise BadSetting("text", "must name a file: the source of the standard library is not installed here")
    return _corpus("Python's standard library", *parts)


def _from_wikitext(folder: Path) -> Corpus:
    parts = [read_wikitext(folder, part) for part in ("train", "valid")]
    if min(map(len, parts)) < _LEAST_BYTES:
        raise BadSetting("text", f"must have at least {_LEAST_BYTES:,} bytes in each part; {folder} has fewer")
    return _corpus("WikiText-2", *parts)


def _from_file(path: Path) -> Corpus:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise BadSetting("text", f"cannot read {path}: {error.strerror}") from error
    if len(content) < _LEAST_BYTES * _HELD_OUT_EVERY:
        least = _LEAST_BYTES * _HELD_OUT_EVERY
        raise BadSetting("text", f"must have at least {least:,} bytes; {path} has {len(content):,}")
    end = len(content) - len(content) // _HELD_OUT_EVERY
    return _corpus(path.name, content[:end], content[end:])


def _corpus(name: str, training: bytes, validation: bytes) -> Corpus:
    return Corpus(name=name, training=_tensor(training), validation=_tensor(validation))


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content[:_MOST_BYTES]), dtype=torch.uint8)
