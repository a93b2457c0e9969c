"""ADEL's deadlines, as used by a session or a simulation."""

import pytest

from stormtorch import BoundedDrift
from stormtorch.checks import BadSetting
from stormtorch_lab import ADEL, SALF
from stormtorch_lab.policies.presets import make_policy

pytestmark = pytest.mark.pure


def test_deadlines_add_up_to_the_total_and_the_last_one_stays() -> None:
    policy = ADEL(total_s=30.0, steps=50, ranks=4, layers=3, layer_s=0.2)
    found = [policy.deadline_at(step) for step in range(50)]
    assert found == list(policy.schedule_s)
    assert sum(policy.schedule_s) == pytest.approx(30.0)
    assert policy.schedule_s[0] < 0.6 < policy.schedule_s[-1]
    assert policy.deadline_at(50) == policy.deadline_at(10_000) == policy.schedule_s[-1]


def test_without_a_deadline_it_waits_for_everyone() -> None:
    assert ADEL(deadline=None).deadline_at(3) is None


def test_slow_ranks_and_falling_rates_change_the_plan() -> None:
    alike = ADEL(total_s=30.0, steps=50, ranks=4, layers=3, layer_s=0.2)
    unlike = ADEL(total_s=30.0, steps=50, ranks=4, layers=3, layer_s=(0.1, 0.2, 0.2, 0.8))
    falling = ADEL(total_s=30.0, steps=50, ranks=4, layers=3, layer_s=0.2, rates=(1.0, 0.0))
    assert len({alike.schedule_s, unlike.schedule_s, falling.schedule_s}) == 3
    assert falling.schedule_s[-1] < falling.schedule_s[25]  # a step without a rate needs no time
    assert alike.schedule_s[-1] > alike.schedule_s[25]


def test_other_policies_have_the_deadline_that_was_given() -> None:
    assert SALF().deadline_at(7) == "auto"
    assert SALF(deadline=0.5).deadline_at(7) == 0.5
    assert BoundedDrift().deadline_at(7) is None


def test_commands_know_it_by_name() -> None:
    assert isinstance(make_policy("adel"), ADEL)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"total_s": 1.0}, "total_s"),
        ({"steps": 0}, "steps"),
        ({"ranks": 0}, "ranks"),
        ({"layers": 0}, "layers"),
        ({"layer_s": -1.0}, "layer_s"),
        ({"layer_s": (0.1, 0.1)}, "layer_s"),
        ({"rates": ()}, "rates"),
        ({"rates": (1.0, 2.0)}, "rates"),
        ({"contraction": 2.0}, "contraction"),
        ({"curvature": 1.0}, "curvature"),
        ({"floor": -1.0}, "floor"),
        ({"deadline": 0.5}, "deadline"),
    ],
)
def test_what_has_no_plan_is_refused_by_name(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(BadSetting, match=f"^{name} must"):
        ADEL(**wrong)  # type: ignore[arg-type]
