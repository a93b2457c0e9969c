"""A pretrained model and WikiText-2 in the tokens of its tokenizer, from folders or packed into one file."""

import io
import lzma
import re
import struct
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from stormtorch.checks import BadSetting, blaming
from stormtorch_lab.tasks.data.checkpoints import read_checkpoint
from stormtorch_lab.tasks.data.corpus import read_wikitext
from stormtorch_lab.tasks.data.split import Split, digest
from stormtorch_lab.tasks.models.llama import LlamaSize

_CHECKPOINT = "stories15M.bin"
_TOKENIZER = "tokenizer.bin"
# Tokens 0 to 2 are not text (unknown, begin, end); the next 256 are bytes, for characters that have no token.
_FIRST_BYTE = 3
_FIRST_TEXT = _FIRST_BYTE + 256
_MOST_PIECE_BYTES = 1024
# Largest size of a pack after decompression.
_MOST_BYTES = 1 << 29


class Tokenizer:
    """Byte-pair encoding by scores, as in SentencePiece and llama2.c.

    Args:
        pieces: Bytes that each token stands for.
        scores: Score of each token. Two neighbours merge if they make a piece: the highest score first, and the
            leftmost pair where scores are equal.
    """

    def __init__(self, pieces: list[bytes], scores: list[float]) -> None:
        self.pieces = pieces
        self._scores = scores
        # Characters without a token fall back to bytes. Bytes merge with nothing: their piece in the file ("<0xE2>", or
        # the character of that number, which is another one) is not what they stand for.
        self._number: dict[bytes, int] = {}
        for number, piece in enumerate(pieces):
            if not _is_byte(number):
                self._number.setdefault(piece, number)
        # If no piece continues beyond the end of a word, words can be encoded one by one.
        apart = not any(re.search(rb"[^ ] ", piece) for piece in pieces[_FIRST_TEXT:])
        self._word = re.compile(r" *[^ ]+| +") if apart else re.compile(r".+", re.DOTALL)
        self._known: dict[str, list[int]] = {}

    @classmethod
    def read(cls, path: Path, vocabulary: int) -> "Tokenizer":
        """Read a file: the length of the longest piece, then score, length and bytes of each piece.

        Raises:
            BadSetting: The file cannot be read, or is no tokenizer; the error names `data`.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadSetting("data", f"must be a folder with a tokenizer: {path}: {error.strerror}") from error
        pieces, scores = [], []
        try:
            at = 4
            for _ in range(vocabulary):
                score, length = struct.unpack_from("<fi", content, at)
                piece = content[at + 8 : at + 8 + length]
                if not 0 <= length <= _MOST_PIECE_BYTES or len(piece) != length:
                    raise ValueError(f"a piece of {length} bytes")
                pieces.append(piece)
                scores.append(score)
                at += 8 + length
        except (struct.error, ValueError) as error:
            raise BadSetting("data", f"holds no tokenizer of {vocabulary} tokens in {path}: {error}") from error
        return cls(pieces, scores)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, encoded as if a space stood before it; without the tokens of begin and end."""
        tokens: list[int] = []
        for word in self._word.findall(f" {text}") if text else ():
            known = self._known.get(word)
            if known is None:
                known = self._known[word] = self.merged(word)
            tokens += known
        return tokens

    def merged(self, text: str) -> list[int]:
        """Tokens of a text, merged pair by pair, which takes time quadratic in its length."""
        tokens: list[int] = []
        for character in text:
            encoded = character.encode("utf-8", "replace")
            number = self._number.get(encoded)
            tokens += [number] if number is not None else [_FIRST_BYTE + byte for byte in encoded]
        while True:
            best: tuple[float, int, int] | None = None
            for at, (first, second) in enumerate(pairwise(tokens)):
                if _is_byte(first) or _is_byte(second):
                    continue
                number = self._number.get(self.pieces[first] + self.pieces[second])
                if number is not None and (best is None or self._scores[number] > best[0]):
                    best = self._scores[number], at, number
            if best is None:
                return tokens
            tokens[best[1] : best[1] + 2] = [best[2]]

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, with the space before it."""
        named = (bytes([token - _FIRST_BYTE]) if _is_byte(token) else self.pieces[token] for token in tokens)
        return b"".join(named).decode("utf-8", "replace")


def _is_byte(token: int) -> bool:
    return _FIRST_BYTE <= token < _FIRST_TEXT


@dataclass(frozen=True, kw_only=True)
class Stories(Split[torch.Tensor]):
    """WikiText-2 in the tokens of a model that has learned stories (int32, one dimension), and that model."""

    size: LlamaSize
    state: dict[str, torch.Tensor]
    """Weights in float32, for `Llama.load_state_dict`."""
    weights: str
    """Type in which the weights were stored: "float32", or "float16" in a pack."""

    def to_json(self) -> dict[str, object]:
        """Describe the text and the stored weights."""
        return super().to_json() | {
            "training_tokens": self.training.numel(),
            "validation_tokens": self.validation.numel(),
            "weights": self.weights,
            "weights_sha256": digest(self.state[name] for name in sorted(self.state)),
        }


def open_stories(path: Path) -> Stories:
    """Read a checkpoint, and the text in its tokens.

    Args:
        path: A folder that holds stories15M.bin, tokenizer.bin, wiki.train.tokens and wiki.valid.tokens, or a file that
            `pack_stories` wrote.

    Raises:
        BadSetting: The files cannot be read; the error names `data`.
    """
    return _unpacked(path) if path.is_file() else _from_folders(path, path)


def pack_stories(stories: Path, wikitext: Path, out: Path) -> None:
    """Write the checkpoint of one folder, and the text of another in its tokens, as one compressed file.

    Weights become float16: the file is half as large, and each weight is off by up to one part in 2048.

    Raises:
        BadSetting: A folder cannot be read; the error names `data`.
    """
    found = _from_folders(stories, wikitext)
    size = asdict(found.size)
    state = {
        name: weight.half() for name, weight in found.state.items() if not (found.size.tied and name == "head.weight")
    }
    # Store all high bytes, then all low ones: high bytes take few values and compress well, low ones are noise.
    planes = {name: weight.view(torch.uint8).view(-1, 2).t().contiguous() for name, weight in state.items()}
    packed = {
        "size": size,
        "shapes": {name: list(weight.shape) for name, weight in state.items()},
        "planes": planes,
        "training": found.training.to(torch.uint16),
        "validation": found.validation.to(torch.uint16),
    }
    content = io.BytesIO()
    torch.save(packed, content)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(lzma.compress(content.getvalue(), preset=6))


def _from_folders(stories: Path, wikitext: Path) -> Stories:
    size, state = read_checkpoint(stories / _CHECKPOINT)
    tokenizer = Tokenizer.read(stories / _TOKENIZER, size.vocabulary)
    parts = []
    for part in ("train", "valid"):
        with blaming("data"):
            text = read_wikitext(wikitext, part).decode("utf-8", "replace")
        parts.append(torch.tensor(tokenizer.encode(text), dtype=torch.int32))
    return _stories(size, state, parts[0], parts[1], "float32")


def _unpacked(path: Path) -> Stories:
    try:
        with lzma.open(path) as file:
            content = file.read(_MOST_BYTES)
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise BadSetting("data", f"cannot read {path}: {error}") from error
    try:
        packed: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        size = LlamaSize(**packed["size"])
        state = {
            name: plane.t().contiguous().view(torch.float16).view(packed["shapes"][name]).float()
            for name, plane in packed["planes"].items()
        }
        if size.tied:
            state["head.weight"] = state["embedding.weight"]
        training, validation = (packed[part].to(torch.int32) for part in ("training", "validation"))
        if max(int(training.max()), int(validation.max())) >= size.vocabulary:
            raise ValueError("a token that the model does not know")
    except Exception as error:  # the file may come from anywhere, and reading it may raise anything
        raise BadSetting("data", f"holds no packed stories in {path}: {error}") from error
    return _stories(size, state, training, validation, "float16")


def _stories(
    size: LlamaSize, state: dict[str, torch.Tensor], training: torch.Tensor, validation: torch.Tensor, weights: str
) -> Stories:
    return Stories(name="WikiText-2", training=training, validation=validation, size=size, state=state, weights=weights)
