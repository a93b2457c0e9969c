"""A small language model like LLaMA: RMSNorm, rotary positions, SwiGLU. By default, tokens are bytes.

Letters at the end of names: B sequences, T tokens, H heads, K elements of a head.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from stormtorch.checks import BadSetting, check_between

BYTES = 256
"""Vocabulary of a model whose tokens are bytes."""
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """Size of the model; the default has 0.82 million parameters."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    """Number of heads; each has `width / heads` elements, which must be an even number."""
    hidden: int | None = None
    """Hidden width of SwiGLU's matrices; None is 8/3 of the width, as in LLaMA, rounded up to a multiple of 8."""
    vocabulary: int = BYTES
    tied: bool = True
    """Whether the embedding is also the output matrix: fewer parameters, which helps small models most."""
    epsilon: float | None = None
    """Number added to the mean square in RMSNorm; None is the precision of float32."""

    def __post_init__(self) -> None:
        check_between("layers", self.layers, 1, 1000)
        check_between("width", self.width, 2, 65536)
        check_between("heads", self.heads, 1, self.width)
        check_between("vocabulary", self.vocabulary, 2, 1_000_000)
        if self.hidden is not None:
            check_between("hidden", self.hidden, 1, 1_000_000)
        if self.epsilon is not None:
            check_between("epsilon", self.epsilon, 0.0, 1.0)
        if self.width % (2 * self.heads):
            raise BadSetting("width", f"must be an even multiple of heads, got {self.width} for {self.heads} heads")

    @property
    def inner(self) -> int:
        """Hidden width, also if `hidden` is None."""
        return -(-8 * self.width // 3 // 8) * 8 if self.hidden is None else self.hidden


class Llama(nn.Module):
    """Model that scores the next token after each token: (B, T) integers become (B, T, vocabulary)."""

    def __init__(self, size: LlamaSize | None = None) -> None:
        super().__init__()
        size = size or LlamaSize()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=size.epsilon)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2, matrices that add to the residual start smaller the more layers add to it.
                adds = name.endswith(("attention.out.weight", "feed.down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if adds else 0.02)
        if size.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score the next token after each token, given that token and those before it."""
        rotary = _rotary_factors(tokens.shape[1], self.size.width // self.size.heads, tokens.device)
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotary)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


class _Layer(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=size.epsilon)
        self.attention = _Attention(size)
        self.feed_norm = nn.RMSNorm(size.width, eps=size.epsilon)
        self.feed = _Feed(size)

    def forward(self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary)
        added: torch.Tensor = hidden + self.feed(self.feed_norm(hidden))
        return added


class _Attention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        sequences, tokens, width = hidden.shape
        parts = self.query_key_value(hidden).view(sequences, tokens, 3, self.heads, width // self.heads)
        query_BHTK, key_BHTK, value_BHTK = parts.permute(2, 0, 3, 1, 4)
        seen_BHTK = functional.scaled_dot_product_attention(
            _apply_rotary(query_BHTK, rotary), _apply_rotary(key_BHTK, rotary), value_BHTK, is_causal=True
        )
        out: torch.Tensor = self.out(seen_BHTK.transpose(1, 2).reshape(sequences, tokens, width))
        return out


class _Feed(nn.Module):
    """SwiGLU."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return down


def _rotary_factors(tokens: int, elements: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles by which rotary embeddings rotate each pair of elements: (T, K/2)."""
    speeds = _ROTARY_BASE ** (-torch.arange(0, elements, 2, device=device) / elements)
    angles = torch.arange(tokens, device=device).unsqueeze(1) * speeds
    return angles.cos(), angles.sin()


def _apply_rotary(vectors_BHTK: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate pairs of elements i and i + K/2, as in LLaMA's published code."""
    cosines, sines = rotary
    first, second = vectors_BHTK.chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
    return turned.type_as(vectors_BHTK)  # under autocast, angles have more bits than the vectors
