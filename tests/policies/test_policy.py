"""The seam of a policy: defaults, what is refused, and what a policy is known to change."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch

from own_policies import Anchored, Blended, Damped, Weighed
from stormtorch import EXACT, LOSSY, BoundedDrift, GradientAveraging, ModelAveraging, OwnerPolicy, Policy, RankPolicy
from stormtorch.policies.policy import overrides

pytestmark = pytest.mark.pure


def test_a_policy_without_functions_is_plain_averaging() -> None:
    policy = RankPolicy()
    own, came = torch.zeros(2, 3), torch.ones(2, 3)
    assert policy.send(own, 0.5) is own
    assert policy.combine(own, 2.0, 4) is own
    assert policy.update({}, own) is own
    assert policy.accept(own, came, torch.tensor([[True], [False]])).tolist() == [[1.0] * 3, [0.0] * 3]
    assert policy.order(3, torch.Generator()) == [0, 1, 2]


def test_what_came_of_a_lost_chunk_does_no_harm() -> None:
    came = torch.full((1, 3), torch.nan)
    assert RankPolicy().accept(torch.ones(1, 3), came, torch.tensor([[False]])).tolist() == [[1.0] * 3]


def test_owners_publish_ahead_by_so_many_updates() -> None:
    policy = OwnerPolicy()
    assert policy.ahead(0.4) == 0.0
    assert policy.publish(torch.zeros(1, 2), torch.ones(1, 2), 0.5).tolist() == [[1.5, 1.5]]


def test_one_reliability_holds_for_both_stages_unless_a_stage_has_its_own() -> None:
    assert (BoundedDrift().up, BoundedDrift().down) == (LOSSY, LOSSY)
    assert (BoundedDrift(reliability=EXACT).up, BoundedDrift(reliability=EXACT).down) == (EXACT, EXACT)
    mixed = BoundedDrift(reliability=EXACT, gradients=LOSSY)
    assert (mixed.up, mixed.down) == (LOSSY, EXACT)


@pytest.mark.parametrize(
    ("policy", "changed"),
    [
        (ModelAveraging(), {"order"}),
        (GradientAveraging(), set()),
        (Blended(), {"accept"}),
        (Anchored(), {"update"}),
        (Weighed(), {"send", "combine"}),
    ],
)
def test_a_policy_is_known_by_what_it_changes(policy: RankPolicy, changed: set[str]) -> None:
    names = ("send", "combine", "update", "accept", "order")
    assert {name for name in names if overrides(policy, name)} == changed
    assert policy.weighs == ("send" in changed)


def test_gradients_are_weighed_link_by_link_only_where_that_is_asked_for() -> None:
    assert not BoundedDrift().weighs
    assert BoundedDrift(weights="horvitz-thompson").weighs
    assert not BoundedDrift(weights="horvitz-thompson", gradients=EXACT).weighs
    assert overrides(Damped(), "publish")
    with pytest.raises(AttributeError, match="policies have no function 'pray'"):
        overrides(Damped(), "pray")


def test_a_policy_must_say_who_runs_the_optimizer() -> None:
    with pytest.raises(TypeError, match="Policy must derive from OwnerPolicy or RankPolicy"):
        Policy()


def test_gradients_are_exchanged_at_every_step_or_not_at_all() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Rare(RankPolicy):
        sends: ClassVar[Literal["gradients", "parameters"]] = "gradients"

    with pytest.raises(ValueError, match="every must be 1 where gradients are exchanged, got 2"):
        Rare(every=2)


@pytest.mark.parametrize("kind", [BoundedDrift, ModelAveraging, GradientAveraging])
@pytest.mark.parametrize(
    ("knob", "value"),
    [
        *(("wire", torch.int32), ("bucket_mb", 0.0), ("settings", "mine"), ("warn_every", 0)),
        *(("give_up_s", 0.0), ("collective_wait_s", -1.0), ("drift_samples", -1)),
    ],
)
def test_a_bad_setting_of_any_policy_is_refused_by_name(kind: type[Policy], knob: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{knob} must"):
        kind(**{knob: value})  # type: ignore[arg-type]
