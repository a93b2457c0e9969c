"""Policies by name: presets with the settings of commands, and classes from files."""

from pathlib import Path

import pytest
import torch

import stormtorch
import stormtorch_lab
from example_runs import EXAMPLES
from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, RankPolicy, Reliability
from stormtorch.checks import BadSetting
from stormtorch.policies import registry
from stormtorch_lab.policies.presets import PRESETS, PolicySettings, make_policy, named

pytestmark = pytest.mark.pure

OWN = EXAMPLES / "own_policy.py"


def test_presets_are_the_librarys_policies_with_the_settings_that_were_chosen() -> None:
    settings = PolicySettings(wire="bfloat16", budget=0.1, gradient_budget=0.3, lead=2.0, max_lag=7, every=5)
    some, wire = Reliability(budget=0.1), torch.bfloat16
    drift = BoundedDrift(gradients=Reliability(budget=0.3), reliability=some, lead=0.0, max_lag=7, wire=wire)
    assert [make_policy(name, settings) for name in PRESETS] == [
        BoundedDrift(reliability=EXACT, wire=wire),
        drift,
        BoundedDrift(gradients=Reliability(budget=0.3), reliability=some, lead=2.0, max_lag=7, wire=wire),
        ModelAveraging(every=5, reliability=some, wire=wire),
        GradientAveraging(reliability=some, wire=wire),
    ]


def test_budget_is_of_gradients_too_unless_they_have_their_own() -> None:
    policy = make_policy("lead", PolicySettings(budget=0.2))
    assert policy.up == policy.down == Reliability(budget=0.2)


def test_the_example_is_a_complete_policy_of_under_forty_lines() -> None:
    assert len(OWN.read_text().splitlines()) < 40
    policy = make_policy(f"{OWN}:Elastic", PolicySettings(every=9, wire="int8", budget=0.5, max_lag=3))
    assert isinstance(policy, RankPolicy)
    assert (policy.every, policy.wire, policy.reliability) == (9, torch.int8, Reliability(budget=0.5))
    assert policy.pull == 0.5  # type: ignore[attr-defined]


def test_a_class_of_a_file_is_the_same_one_each_time() -> None:
    assert type(make_policy(f"{OWN}:Elastic")) is type(make_policy(f"{OWN}:Elastic"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("leed", "policy must be one of lossless, plain, lead"),
        ("nowhere.py:Mine", "policy: there is no Python file nowhere.py"),
        (f"{OWN}:Nobody", "has no class Nobody"),
        (f"{OWN}:torch", r"derive torch in .*own_policy.py from stormtorch.OwnerPolicy or stormtorch.RankPolicy"),
        (f"{OWN}", "policy must name a class in a file, as in my.py:MyPolicy"),
    ],
)
def test_a_wrong_name_is_refused_in_a_sentence_that_says_what_to_write(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_policy(name)


def test_a_file_that_cannot_be_imported_says_so_and_may_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(ValueError, match="nothing_of_this_name"):
        make_policy(f"{path}:Mine")
    path.write_text("import stormtorch\nclass Mine(stormtorch.RankPolicy): pass\n")
    assert type(make_policy(f"{path}:Mine")).__name__ == "Mine"


def test_a_setting_that_was_given_holds_though_it_is_the_usual_one() -> None:
    assert make_policy(f"{OWN}:Elastic").every == 4  # type: ignore[attr-defined]
    given = PolicySettings(every=1, given=frozenset({"every"}))
    assert make_policy(f"{OWN}:Elastic", given).every == 1  # type: ignore[attr-defined]


def test_a_wrong_class_name_is_answered_by_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"has no class Elastik, only Elastic$"):
        make_policy(f"{OWN}:Elastik")


def test_policies_are_found_by_the_names_of_their_classes_and_by_those_that_commands_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for policy in named().values():
        face = stormtorch_lab if policy.__module__.startswith("stormtorch_lab.") else stormtorch
        assert getattr(face, policy.__name__) is policy

    class Newcomer(RankPolicy):
        name = "newcomer"

    monkeypatch.setattr(registry, "named", lambda: {"newcomer": Newcomer})
    assert stormtorch.Newcomer is Newcomer
    with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
        _ = stormtorch.Nobody


def test_blocks_follow_what_owners_carry_and_all_else_is_bounded_drift() -> None:
    policy = stormtorch_lab.PARTEL()
    assert policy.shards == "rate"
    assert policy.ahead(0.1) == BoundedDrift().ahead(0.1) > 0.0
    assert stormtorch_lab.PARTEL(shards="equal").shards == "equal"


def test_a_field_without_a_value_is_read_as_a_seed_or_as_a_number() -> None:
    policy = make_policy("light-dp", PolicySettings(more=(("key_seed", "3"), ("noise", "0.5"))))
    assert isinstance(policy, stormtorch_lab.LightDp)
    assert (policy.key_seed, policy.noise) == (3, 0.5)
    assert isinstance(policy.key_seed, int)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [("salf", "deadline=0.5", 0.5), ("salf", "deadline=auto", "auto"), ("adel", "rates=1,0.5", (1.0, 0.5))],
)
def test_a_field_is_set_to_a_number_a_word_or_several_numbers(name: str, text: str, found: object) -> None:
    knob, _, value = text.partition("=")
    assert getattr(make_policy(name, PolicySettings(more=((knob, value),))), knob) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps=many", "steps must be a whole number, got 'many'"),
        ("inertia=x", "inertia must be a number, got 'x'"),
        ("rates=x", "rates must be numbers"),
        ("hierarchy=maybe", "hierarchy must be true or false"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_words(text: str, words: str) -> None:
    knob, _, value = text.partition("=")
    with pytest.raises(ValueError, match=words):
        make_policy("adel", PolicySettings(more=((knob, value),)))


def test_a_field_that_commands_have_no_option_for_is_blamed_on_the_policy() -> None:
    settings = PolicySettings(every=8, given=frozenset({"every"}))
    with pytest.raises(BadSetting, match=r"policy has streaming-diloco, whose delay must .*: --set delay=VALUE"):
        make_policy("streaming-diloco", settings)
    with pytest.raises(BadSetting, match=r"^every must"):
        make_policy("diloco", PolicySettings(every=0))
