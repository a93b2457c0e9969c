"""Settings of a chaos run, checked on construction."""

from dataclasses import asdict, dataclass, field
from typing import Any

from stormtorch.checks import BadSetting, check_between, check_subset
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.policies.presets import make_policy
from stormtorch_lab.studies.chaos.faults import KINDS, Fault, schedule


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """Settings of a run."""

    hosts: int = 5
    """Hosts of the training, one process on each."""
    spares: int = 1
    """Additional hosts that join and leave."""
    minutes: float = 3.0
    """Minutes in which faults are injected; start, end and the run without faults take further time."""
    seed: int = 1
    """Random seed of the schedule, the packet loss, the weights and the batches."""
    kinds: tuple[str, ...] = KINDS
    """Kinds of faults to inject."""
    network: Conditions = field(default_factory=lambda: Conditions(loss=0.1))
    """Conditions of the network between faults."""
    policy: str = "lead"
    """Policy of the training, named as in `stormtorch train`."""
    silence_s: float = 2.0
    """Seconds of silence after which the ranks exclude a peer."""
    pace_s: float = 0.1
    """Shortest time of a step, which leaves processor time to restarting hosts."""
    digest_every: int = 20
    """Steps between two comparisons of exact parameters."""
    patience_s: float = 30.0
    """Seconds after a fault within which training must continue and an affected host must be back."""
    baseline: bool = True
    """Whether to train again for as many steps without faults, and compare the validation loss."""

    def __post_init__(self) -> None:
        check_between("hosts", self.hosts, 3, 32)
        check_between("spares", self.spares, 0, 16)
        check_between("minutes", self.minutes, 0.1, 24 * 60)
        check_between("seed", self.seed, 0, 1_000_000_000)
        check_between("silence_s", self.silence_s, 0.1, 600)
        check_between("pace_s", self.pace_s, 0.0, 10.0)
        check_between("digest_every", self.digest_every, 1, 1_000_000)
        check_between("patience_s", self.patience_s, 1.0, 3600)
        check_subset("faults", self.kinds, KINDS)
        if self.kinds == ("join",) and not self.spares:
            raise BadSetting("spares", "must be at least 1 if join is the only kind of fault")
        self.network.check(self.hosts + self.spares)
        try:
            make_policy(self.policy)
        except ValueError as error:
            raise BadSetting("policy", str(error).removeprefix("policy ")) from error

    def schedule(self) -> tuple[Fault, ...]:
        """Faults of the run."""
        return schedule(hosts=self.hosts, minutes=self.minutes, seed=self.seed, kinds=self.kinds, spares=self.spares)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = asdict(self)
        del found["network"]  # conditions are reported as requested and measured
        return found
