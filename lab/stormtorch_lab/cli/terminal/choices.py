"""Allowed values of options, declared here instead of imported, so that --help runs without torch; a test compares
them with the real ones.
"""

import re
from enum import StrEnum
from pathlib import Path

import stormtorch
import stormtorch_lab

PRESETS = "lossless,plain,lead,model-averaging,gradient-averaging"


def _named() -> list[str]:
    """Names of the library's other policies, read from their files."""
    places = [*stormtorch.__path__, *stormtorch_lab.__path__]
    files = [file for place in places for file in Path(place, "policies").glob("*.py")]
    pattern = re.compile(r'^    name: ClassVar\[str\] = "([a-z-]+)"', re.MULTILINE)
    return sorted(name for file in files for name in pattern.findall(file.read_text()))


NAMED_POLICIES = ",".join(_named())
POLICIES = f"{PRESETS},{NAMED_POLICIES}"
TRAIN_POLICIES = "lossless,plain,lead"
SIMULATE_POLICIES = "lossless,lead"
WIRES = "float32,bfloat16,float16,int8,int4"
MODELS = "llama,stories15m,resnet20,resnet110,lstm"
BACKENDS = "storm,storm-lossy,gloo"
LAB_BACKENDS = "storm,storm-lossy,gloo-bbr,gloo-cubic"
DDP_BACKENDS = "storm,storm-lossy,storm-drift,gloo"
LAB_DDP_BACKENDS = "storm,storm-lossy,storm-drift,gloo-bbr,gloo-cubic"
LEARNERS = "gloo,storm-drift"
LAB_LEARNERS = "gloo-bbr,storm-drift"
FAULTS = "kill,pause,cut,link,outage,partition,storm,mtu,join,leave"
SUITE = "allreduce,latency,ddp,cable,lab,hierarchy,mpi"
NEIGHBOURS = "model-averaging,lead,ddp,ddp-low,none"
FAIRNESS_CHECKS = "all-to-all,incast,tcp,low,latency,alone,pause,step"
WARMUP, LAB_WARMUP = 3, 1
PARAMS_M, LAB_PARAMS_M = 25.0, 10.0


class Wire(StrEnum):
    """Number formats on the network."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int8 = "int8"
    int4 = "int4"


class ShardSizes(StrEnum):
    """Ways to partition the parameters among the ranks."""

    equal = "equal"
    rate = "rate"


class Weights(StrEnum):
    """Ways to weigh the received gradients."""

    mean = "mean"
    horvitz_thompson = "horvitz-thompson"


class Optimizer(StrEnum):
    """Optimizers of a simulation: the model's own, or another."""

    task = "task"
    adamw = "adamw"
    nadam = "nadam"
    momentum = "momentum"
    sgd = "sgd"


class Device(StrEnum):
    """Devices of a simulation."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """Number formats in which a simulation multiplies matrices."""

    float32 = "float32"
    tf32 = "tf32"
    bfloat16 = "bfloat16"


class How(StrEnum):
    """Ways to compute the gradients of many workers."""

    auto = "auto"
    batched = "batched"
    loop = "loop"


class YieldTo(StrEnum):
    """Ways in which traffic of low priority yields."""

    classes = "classes"
    latency = "latency"
    queues = "queues"


class Dtype(StrEnum):
    """Number formats that all backends can sum."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def spaced(known: str) -> str:
    """Joins names with spaces, so that a narrow terminal can break lines there."""
    return known.replace(",", ", ")
