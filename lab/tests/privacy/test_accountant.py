"""Epsilon and noise: against the closed form, known values of another library, and each other."""

import math

import pytest

from stormtorch.checks import BadSetting
from stormtorch_lab.privacy import epsilon, noise_for
from stormtorch_lab.privacy.accountant import Method
from stormtorch_lab.privacy.noise import noise_that_arrives, share_of_noise

pytestmark = pytest.mark.pure

# noise, sample rate, steps, and epsilon at delta = 1e-5 as dp-accounting 0.6.0 finds it: by Renyi's divergence, and by
# privacy loss distributions.
KNOWN = [
    (1.0, 0.01, 1000, 2.101366525420273, 1.8282436455855091),
    (0.7, 0.02, 500, 7.664087767817467, 6.65378003833356),
    (1.1, 256 / 60000, 14040, 2.5943633557853634, 2.3796435199377344),
]


@pytest.mark.parametrize("noise, sample_rate, steps, by_renyi, tight", KNOWN)
def test_epsilon_is_what_another_library_finds(
    noise: float, sample_rate: float, steps: int, by_renyi: float, tight: float
) -> None:
    assert epsilon(noise, sample_rate=sample_rate, steps=steps, delta=1e-5, method="rdp") == pytest.approx(
        by_renyi, rel=1e-3
    )
    found = epsilon(noise, sample_rate=sample_rate, steps=steps, delta=1e-5)
    assert tight <= found <= tight + 0.03


@pytest.mark.parametrize("noise, steps", [(4.0, 10), (1.0, 1), (30.0, 500)])
def test_without_sampling_epsilon_is_that_of_one_gaussian_mechanism(noise: float, steps: int) -> None:
    found = epsilon(noise, sample_rate=1.0, steps=steps, delta=1e-5)

    def cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2.0)) / 2.0

    mu = math.sqrt(steps) / noise
    delta = cdf(mu / 2.0 - found / mu) - math.exp(found) * cdf(-mu / 2.0 - found / mu)
    assert delta == pytest.approx(1e-5, rel=1e-6)


def test_the_closed_form_agrees_with_privacy_loss_distributions() -> None:
    assert epsilon(4.0, sample_rate=1.0, steps=10, delta=1e-5) == pytest.approx(3.341409517638289, rel=1e-3)


def test_little_noise_has_an_epsilon_that_does_not_overflow() -> None:
    assert 40.0 < epsilon(0.1, sample_rate=1.0, steps=1, delta=1e-5) < 100.0
    with pytest.raises(BadSetting, match="noise must be larger"):
        epsilon(0.001, sample_rate=1.0, steps=1, delta=1e-5)


@pytest.mark.parametrize(
    "method, sample_rate", [("rdp", 0.02), ("rdp", 1.0), pytest.param("prv", 0.02, marks=[pytest.mark.slow])]
)
def test_noise_for_is_the_least_that_keeps_epsilon(method: Method, sample_rate: float) -> None:
    def found(noise: float) -> float:
        return epsilon(noise, sample_rate=sample_rate, steps=200, delta=1e-5, method=method)

    noise = noise_for(3.0, sample_rate=sample_rate, steps=200, delta=1e-5, method=method, tolerance=0.05)
    assert found(noise) <= 3.0 < found(0.94 * noise)


def test_more_noise_fewer_steps_and_less_sampling_are_more_private() -> None:
    def found(noise: float = 1.0, sample_rate: float = 0.01, steps: int = 100) -> float:
        return epsilon(noise, sample_rate=sample_rate, steps=steps, delta=1e-5, method="rdp")

    assert found(noise=1.2) < found() < found(steps=200) < found(steps=200, sample_rate=0.02)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("noise", {"noise": 0.0}),
        ("sample_rate", {"sample_rate": 1.5}),
        ("steps", {"steps": 0}),
        ("delta", {"delta": 1.0}),
        ("method", {"method": "moments"}),
    ],
)
def test_what_is_no_setting_is_refused_by_name(name: str, settings: dict[str, float]) -> None:
    with pytest.raises(BadSetting, match=f"^{name} must"):
        epsilon(**({"noise": 1.0, "sample_rate": 0.1, "steps": 10, "delta": 1e-5} | settings))  # type: ignore[arg-type]


def test_the_noise_of_all_sharers_together_is_what_was_asked_for() -> None:
    ranks, batch, clip, noise = 5, 8, 0.3, 1.1
    each = share_of_noise(noise, clip, batch, ranks)
    of_sum = math.sqrt(ranks) * each * batch
    assert of_sum == pytest.approx(noise * clip)
    for arrived in range(1, ranks + 1):
        of_mean, by_one_sample = each / math.sqrt(arrived), clip / (arrived * batch)
        assert of_mean / by_one_sample == pytest.approx(noise_that_arrives(noise, arrived, ranks))
    assert noise_that_arrives(noise, 4, 5) < noise_that_arrives(noise, 5, 5) == noise
