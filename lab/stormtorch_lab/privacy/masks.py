"""Pairwise masks for secure aggregation: they cancel out in the sum of all uploads, as in LightDP-FL.

Rank i uploads w_i + n_i + sum_{j>i} s_ij - sum_{j<i} s_ij. In the sum of all uploads every s_ij
cancels out, and an owner learns no single upload. Both ends of a pair compute s_ij from a secret that only they know,
the number of the round and the offset of an element in the model, so a mask does not depend on how messages are split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

SECRET_BYTES = 32
PUBLIC_BYTES = 32
_ABOUT = b"stormtorch pairwise masks 1"
# ChaCha20 makes blocks of 64 bytes, and a normal number takes 4.
_PER_BLOCK = 16


def new_key() -> X25519PrivateKey:
    """Makes the secret key of a rank."""
    try:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    except ImportError as error:
        raise ImportError("masks between ranks need cryptography: pip install 'stormtorch-lab[privacy]'") from error
    return X25519PrivateKey.generate()


def public_part(key: X25519PrivateKey) -> bytes:
    """Returns the public part of a key, which a rank announces."""
    return key.public_key().public_bytes_raw()


def shared_secret(key: X25519PrivateKey, theirs: bytes) -> bytes:
    """Returns the secret of a pair of ranks: both compute the same, each from its own key and the other's public part.

    Raises:
        ValueError: `theirs` is not a public part; it is untrusted input.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(theirs) != PUBLIC_BYTES:
        raise ValueError(f"a public key has {PUBLIC_BYTES} bytes, got {len(theirs)}")
    exchanged = key.exchange(X25519PublicKey.from_public_bytes(theirs))  # rejects points of small order
    # Both public parts belong to the secret, in an order that both ends know.
    both = b"".join(sorted((public_part(key), theirs)))
    return HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=None, info=_ABOUT + both).derive(exchanged)


def pretended_secret(seed: int, one: int, other: int) -> bytes:
    """Returns a secret of a pair of virtual workers, from a seed: not secret from holders of the seed."""
    pair = f"{seed}/{min(one, other)}/{max(one, other)}".encode()
    return hashlib.blake2b(pair, digest_size=SECRET_BYTES, person=b"pretended").digest()


def normals(secret: bytes, round_: int, first: int, count: int) -> torch.Tensor:
    """Returns standard normal numbers, in float32, for some elements of the model.

    An element's number depends only on the secret, the round and its offset. Ends that compute on machines whose
    logarithms differ in the last bit get numbers that differ in the last bit.

    Args:
        secret: Secret of a pair.
        round_: Number of the exchange.
        first: Offset of the first element in the model.
        count: Number of elements.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    block, skipped = divmod(first, _PER_BLOCK)
    blocks = -(-(skipped + count) // _PER_BLOCK)
    # The cipher's block counter comes first, then a nonce, which is the round.
    nonce = block.to_bytes(4, "little") + round_.to_bytes(12, "little")
    stream = Cipher(ChaCha20(secret, nonce), mode=None).encryptor().update(bytes(64 * blocks))
    numbers = np.frombuffer(stream, dtype="<u4").astype(np.float64).reshape(-1, 2)
    # Box and Muller: two uniform numbers make two normal ones. The first lies in (0, 1], as its logarithm is taken.
    radius = np.sqrt(-2.0 * np.log((numbers[:, 0] + 1.0) / 2.0**32))
    angle = 2.0 * np.pi * numbers[:, 1] / 2.0**32
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    return torch.from_numpy(pairs[skipped : skipped + count].astype(np.float32))


def pairwise_mask(
    index: int, secrets: Mapping[int, bytes], round_: int, first: int, count: int, scale: float
) -> torch.Tensor:
    """Returns the sum of a rank's masks for some elements: those with later ranks, less those with earlier ones.

    Args:
        index: Index of this rank among the members.
        secrets: Secret that it shares with each other rank, by index.
        round_: Number of the exchange.
        first: Offset of the first element in the model.
        count: Number of elements.
        scale: Standard deviation of each mask.
    """
    total = torch.zeros(count, dtype=torch.float32)
    for other, secret in sorted(secrets.items()):
        total.add_(normals(secret, round_, first, count), alpha=scale if other > index else -scale)
    return total


def residue_variance(arrived: int, missing: int, noise: float, mask: float) -> float:
    """Returns the variance that noise and masks leave in the sum of uploads; exact.

    Each upload that arrived has noise of its own, and a mask with each rank that is missing, which nothing cancels.

    Args:
        arrived: Number of uploads in the sum, U.
        missing: Number of ranks whose uploads are lost, S.
        noise: Standard deviation of a rank's own noise.
        mask: Standard deviation of a pair's mask.
    """
    return arrived * noise**2 + arrived * missing * mask**2
