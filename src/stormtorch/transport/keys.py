"""Job keys: how to make a strong one, and what counts as weak."""

import secrets

SHORTEST_BYTES = 16
_FEWEST_DIFFERENT = 8
VARIABLE = "STORM_KEY"
"""Where torch.distributed's groups look for a key that the options do not name."""


def new_key() -> str:
    """A key of 256 random bits, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def check_key(key: object) -> None:
    """Raises ValueError if a key is none or is easy to guess. A key is never part of the message."""
    remedy = "`stormtorch keygen` makes a strong one"
    if not isinstance(key, bytes):
        raise ValueError(f"key must be bytes, got {type(key).__name__}: text becomes bytes by .encode()")
    if len(key) < SHORTEST_BYTES:
        raise ValueError(f"key must have at least {SHORTEST_BYTES} bytes, got {len(key)}: {remedy}")
    if len(set(key)) < _FEWEST_DIFFERENT:
        raise ValueError(f"key must have at least {_FEWEST_DIFFERENT} different bytes, got {len(set(key))}: {remedy}")
    if key in (key + key)[1:-1]:
        raise ValueError(f"key must not be a short piece that is repeated: {remedy}")
