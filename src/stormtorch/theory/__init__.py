"""Theory of training under packet loss: formulas as pure functions, without tensors or other parts of stormtorch.

`p` is the probability that a chunk is lost, independently of all others; `n` is the number of ranks. Docstrings refer
to two papers: "Weintraub" is Weintraub, Banner, Orda, Distributed Training under Packet Loss, 2025 (arXiv 2507.07114),
and "RPS" is Yu et al., Distributed Learning over Unreliable Networks, ICML 2019 (arXiv 1810.07766).
"""

from stormtorch.theory.averaging import averaging_rate, mixing, rate_factor
from stormtorch.theory.cost import averaging_steps, lead_steps, plain_steps
from stormtorch.theory.deadline import (
    best_deadline,
    deadline_cost,
    lateness_inflation,
    step_seconds,
    steps_covered,
)
from stormtorch.theory.drift import best_lead, common_drift, owner_drift, pair_bound, pair_drift, pair_drift_published
from stormtorch.theory.exchange import Bottleneck, sent_again, step_on_bottleneck_s
from stormtorch.theory.gradients import (
    horvitz_thompson_inflation,
    mean_inverse_count,
    owner_overweight,
    variance_inflation,
)
from stormtorch.theory.lag import fetched, lag_probability, lag_variance, largest_lag, lead, mean_lag
from stormtorch.theory.layers import (
    Backward,
    Descent,
    best_deadlines,
    deadlines_bound,
    layer_probabilities,
    layers_inflation,
    layers_missed,
    least_deadline,
)
from stormtorch.theory.prediction import KINDS, Kind, Prediction, predict
from stormtorch.theory.redundancy import (
    block_parity,
    least_redundancy,
    most_redundancy,
    parity_of,
    residual_loss,
    stretches_of,
)

__all__ = [
    "KINDS",
    "Backward",
    "Bottleneck",
    "Descent",
    "Kind",
    "Prediction",
    "averaging_rate",
    "averaging_steps",
    "best_deadline",
    "best_deadlines",
    "best_lead",
    "block_parity",
    "common_drift",
    "deadline_cost",
    "deadlines_bound",
    "fetched",
    "horvitz_thompson_inflation",
    "lag_probability",
    "lag_variance",
    "largest_lag",
    "lateness_inflation",
    "layer_probabilities",
    "layers_inflation",
    "layers_missed",
    "lead",
    "lead_steps",
    "least_deadline",
    "least_redundancy",
    "mean_inverse_count",
    "mean_lag",
    "mixing",
    "most_redundancy",
    "owner_drift",
    "owner_overweight",
    "pair_bound",
    "pair_drift",
    "pair_drift_published",
    "parity_of",
    "plain_steps",
    "predict",
    "rate_factor",
    "residual_loss",
    "sent_again",
    "step_on_bottleneck_s",
    "step_seconds",
    "steps_covered",
    "stretches_of",
    "variance_inflation",
]
