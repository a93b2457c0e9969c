"""What options of `stormtorch simulate` can be: the names that its help tells."""

from enum import StrEnum

# Declared here, so that --help answers without importing torch; a test compares them with the real ones.
POLICIES = "lossless,bounded-drift,plain,lead,model-averaging,gradient-averaging"
DEFAULT_POLICIES = "lossless,bounded-drift"
MODELS = "llama,stories15m,resnet20,resnet110,lstm"


class Wire(StrEnum):
    """What gradients and parameters can travel as."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(StrEnum):
    """How gradients that arrived are weighed."""

    mean = "mean"
    horvitz_thompson = "horvitz-thompson"


class Optimizer(StrEnum):
    """What takes the steps."""

    task = "task"
    adamw = "adamw"
    nadam = "nadam"
    momentum = "momentum"
    sgd = "sgd"


class Device(StrEnum):
    """What computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """What matrices are multiplied in."""

    float32 = "float32"
    tf32 = "tf32"
    bfloat16 = "bfloat16"


class How(StrEnum):
    """How gradients of many workers are computed."""

    auto = "auto"
    batched = "batched"
    loop = "loop"


def spaced(known: str) -> str:
    """Names that a narrow terminal breaks between lines: without spaces it would cut them off."""
    return known.replace(",", ", ")
