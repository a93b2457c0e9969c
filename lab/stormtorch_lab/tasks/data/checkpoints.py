"""LLaMA checkpoints in the layout of llama2.c, read as weights of `Llama`.

A file holds seven int32 (width, hidden, layers, heads, heads of keys and values, vocabulary, context), then float32
weights, matrix by matrix, each for all layers. A negative vocabulary means that the output matrix is not tied to the
embedding.
"""

import math
from pathlib import Path

import torch

from stormtorch.checks import BadSetting
from stormtorch_lab.tasks.models.llama import LlamaSize

_HEADER = 7
# Epsilon of RMSNorm with which the models of llama2.c were trained; the file does not hold it.
_EPSILON = 1e-5
# Largest file to read, as files may come from anywhere: a model of 250 million parameters.
_MOST_BYTES = 1 << 30


def read_checkpoint(path: Path) -> tuple[LlamaSize, dict[str, torch.Tensor]]:
    """Read the size of a model, and its weights for `Llama.load_state_dict`.

    Raises:
        BadSetting: The file cannot be read, or is no checkpoint that `Llama` can hold; the error names `data`.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadSetting("data", f"holds no checkpoint in {path}: it is too large")
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise BadSetting("data", f"must be a folder with a checkpoint: {path}: {error.strerror}") from error
    if len(content) < 4 * _HEADER or len(content) % 4:
        raise BadSetting("data", f"holds no checkpoint in {path}: it has {len(content):,} bytes")
    width, hidden, layers, heads, key_heads, vocabulary, context = torch.frombuffer(
        content, dtype=torch.int32, count=_HEADER
    ).tolist()
    try:
        size = LlamaSize(
            layers=layers,
            width=width,
            heads=heads,
            hidden=hidden,
            vocabulary=abs(vocabulary),
            tied=vocabulary > 0,
            epsilon=_EPSILON,
        )
    except BadSetting as error:
        raise BadSetting("data", f"holds no checkpoint in {path}: its {error.name} {error.problem}") from error
    if key_heads != heads:
        raise BadSetting(
            "data", f"shares keys among heads in {path}, which Llama does not support: {key_heads} of {heads}"
        )
    weights = _Weights(torch.frombuffer(content, dtype=torch.float32)[_HEADER:])
    rotary_count = 2 * context * (width // heads // 2)
    expected = _elements(size) + rotary_count
    if weights.left != expected:
        raise BadSetting(
            "data", f"holds no checkpoint in {path}: it has {weights.left:,} weights instead of {expected:,}"
        )
    return size, _state(size, weights, rotary_count)


class _Weights:
    """One row of numbers, from which tensors are taken one after the other."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    @property
    def left(self) -> int:
        return self._row.numel()

    def take(self, *shape: int) -> torch.Tensor:
        count = math.prod(shape)
        taken, self._row = self._row[:count], self._row[count:]
        return taken.view(shape)


def _elements(size: LlamaSize) -> int:
    layer = 4 * size.width * size.width + 3 * size.width * size.inner + 2 * size.width
    return size.layers * layer + (1 if size.tied else 2) * size.vocabulary * size.width + size.width


def _state(size: LlamaSize, weights: _Weights, rotary_count: int) -> dict[str, torch.Tensor]:
    layers, width, inner = size.layers, size.width, size.inner
    embedding = weights.take(size.vocabulary, width)
    attention_norm = weights.take(layers, width)
    query = _halves(weights.take(layers, width, width), size.heads)
    key = _halves(weights.take(layers, width, width), size.heads)
    value = weights.take(layers, width, width)
    out = weights.take(layers, width, width)
    feed_norm = weights.take(layers, width)
    gate = weights.take(layers, inner, width)
    down = weights.take(layers, width, inner)
    up = weights.take(layers, inner, width)
    norm = weights.take(width)
    weights.take(rotary_count)  # cosines and sines, which the model computes itself
    state = {
        "embedding.weight": embedding,
        "norm.weight": norm,
        "head.weight": embedding if size.tied else weights.take(size.vocabulary, width),
    }
    for layer in range(layers):
        prefix = f"layers.{layer}."
        state[prefix + "attention_norm.weight"] = attention_norm[layer]
        state[prefix + "attention.query_key_value.weight"] = torch.cat((query[layer], key[layer], value[layer]))
        state[prefix + "attention.out.weight"] = out[layer]
        state[prefix + "feed_norm.weight"] = feed_norm[layer]
        state[prefix + "feed.gate.weight"] = gate[layer]
        state[prefix + "feed.up.weight"] = up[layer]
        state[prefix + "feed.down.weight"] = down[layer]
    return {name: weight.clone() for name, weight in state.items()}


def _halves(rows_LDD: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head: llama2.c rotates elements 2i and 2i + 1 together, `Llama` i and i + K/2."""
    layers, width, _ = rows_LDD.shape
    pairs = rows_LDD.view(layers, heads, width // heads // 2, 2, width)
    return pairs.transpose(2, 3).reshape(layers, width, width)
