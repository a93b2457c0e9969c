"""How ranks train together: one line in a training script, `stormtorch.prepare(model, optimizer, policy=...)`."""

from stormtorch.policies.ledger import Ledger, Row
from stormtorch.policies.norms import clip_grad_norm_
from stormtorch.policies.policy import BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.policies.preparing import exact, no_sync, prepare

__all__ = [
    "BoundedDrift",
    "GradientAveraging",
    "Ledger",
    "ModelAveraging",
    "Row",
    "clip_grad_norm_",
    "exact",
    "no_sync",
    "prepare",
]
