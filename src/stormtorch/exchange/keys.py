"""Job keys for encryption and authentication: makes strong ones and rejects weak ones."""

import secrets

SHORTEST_BYTES = 16
_FEWEST_DIFFERENT = 8
VARIABLE = "STORM_KEY"
"""Environment variable with the key of torch.distributed groups whose options have none."""


def new_key() -> str:
    """Makes a key of 256 random bits, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def check_key(key: object) -> None:
    """Raises ValueError if a key is missing or easy to guess. The message never shows the key."""
    remedy = "`stormtorch keygen` makes a strong one"
    if not isinstance(key, bytes):
        raise ValueError(f"key must be bytes, got {type(key).__name__}: call .encode() on text")
    if len(key) < SHORTEST_BYTES:
        raise ValueError(f"key must have at least {SHORTEST_BYTES} bytes, got {len(key)}: {remedy}")
    if len(set(key)) < _FEWEST_DIFFERENT:
        raise ValueError(f"key must have at least {_FEWEST_DIFFERENT} different bytes, got {len(set(key))}: {remedy}")
    if key in (key + key)[1:-1]:
        raise ValueError(f"key must not repeat a shorter piece: {remedy}")
