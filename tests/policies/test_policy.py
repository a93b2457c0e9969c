"""The interface of a policy: defaults, refused settings and classes, and detection of overridden functions."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch

from own_policies import Anchored, Blended, Damped, Weighed
from stormtorch import EXACT, LOSSY, BoundedDrift, GradientAveraging, ModelAveraging, OwnerPolicy, Policy, RankPolicy
from stormtorch.policies import rules
from stormtorch.policies.memory import NO_MEMORY
from stormtorch.policies.policy import applied, overrides

pytestmark = pytest.mark.pure


def test_a_policy_without_functions_is_plain_averaging() -> None:
    policy = RankPolicy()
    own, received = torch.zeros(2, 3), torch.ones(2, 3)
    assert policy.send(own, 0.5) is own
    assert policy.combine(own, 2.0, 4) is own
    assert policy.update(NO_MEMORY, own) is own
    assert policy.accept(own, received, torch.tensor([[True], [False]])).tolist() == [[1.0] * 3, [0.0] * 3]
    assert policy.order(3, torch.Generator()) == [0, 1, 2]


def test_what_came_of_a_lost_chunk_does_no_harm() -> None:
    received = torch.full((1, 3), torch.nan)
    assert RankPolicy().accept(torch.ones(1, 3), received, torch.tensor([[False]])).tolist() == [[1.0] * 3]


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

    with pytest.raises(ValueError, match="every must be 1 if gradients are exchanged, got 2"):
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


# --- classes that would train otherwise than they read ----------------------------------------------------------------


class Undecorated(RankPolicy):
    every: int = 3


@dataclass(frozen=True, kw_only=True)
class Untyped(RankPolicy):
    every = 3


@dataclass(frozen=True, kw_only=True)
class Misspelt(RankPolicy):
    def acept(self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        return own


@dataclass(frozen=True, kw_only=True)
class OwnerWithUpdate(OwnerPolicy):
    def update(self, owner: dict[str, torch.Tensor], combined: torch.Tensor) -> torch.Tensor:
        return combined


@dataclass(frozen=True, kw_only=True)
class RankWithLead(RankPolicy):
    def ahead(self, loss: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Forgetful(ModelAveraging):
    def update(self, owner: object, combined: torch.Tensor) -> torch.Tensor:
        return combined


@dataclass(frozen=True, kw_only=True)
class Elsewhere(RankPolicy):
    sends = "grads"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Undecorated,
            r"decorate Undecorated with @dataclass\(frozen=True, kw_only=True\): without it, every is ignored",
        ),
        (Untyped, "write every in Untyped with its type"),
        (Misspelt, "Misspelt.acept is never called: did you mean accept?"),
        (OwnerWithUpdate, "OwnerWithUpdate is an OwnerPolicy, which has no update: derive it from RankPolicy"),
        (RankWithLead, "RankWithLead is a RankPolicy, which has no ahead: derive it from OwnerPolicy"),
        (Forgetful, "Forgetful overrides both update and order"),
        (Elsewhere, 'sends must be "gradients" or "parameters", got \'grads\''),
    ],
)
def test_a_class_whose_words_would_be_ignored_is_refused(kind: type[Policy], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kind()


def test_a_class_may_have_functions_of_its_own_and_any_default() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Fine(RankPolicy):
        every: int = 3
        part: float = 0.5
        sends: ClassVar[Literal["gradients", "parameters"]] = "parameters"

        def helper(self) -> float:
            return self.part

    assert (Fine().every, Fine(every=7).every, Fine().helper()) == (3, 7, 0.5)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, r"Odd.accept must return a tensor of shape \(2, 3\), it returned None"),
        (torch.zeros(6), r"Odd.accept must return a tensor of shape \(2, 3\), it returned one of shape \(6,\)"),
        (torch.zeros(2, 1), r"it returned one of shape \(2, 1\)"),
    ],
)
def test_a_wrong_result_names_the_policy_the_function_and_the_shape(result: object, words: str) -> None:
    class Odd(RankPolicy):
        def accept(self, own: torch.Tensor, received: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # it may leave out rank
            return result  # type: ignore[return-value]

    own = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=words):
        applied(Odd().accept, own, own, torch.ones(2, 1))


def test_a_copy_is_overdue_at_the_age_that_another_loss_would_exceed() -> None:
    assert rules.overdue(torch.tensor([0, 1, 2, 3]), 2).tolist() == [False, False, True, True]
