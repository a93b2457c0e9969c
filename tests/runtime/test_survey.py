"""No optimizer of torch's and no idiom of a training loop comes to another result silently."""

import pytest

from survey_cases import judge
from survey_idioms import IDIOMS
from survey_optimizers import TORCH, subjects

pytestmark = pytest.mark.pure

FEW = (
    "p.data.clamp_()",
    "clip_grad_norm_",
    "closure",
    "GradScaler",
    "accumulation without no_sync()",
    "p.grad = p.grad * 0.5",
)


@pytest.mark.parametrize("name", TORCH)
def test_no_optimizer_of_torch_is_silently_different_when_a_rank_dies(name: str) -> None:
    verdict, about = judge(subjects("torch")[name], "one killed")
    assert verdict in ("same bits", "rounding", "refused"), f"{verdict}: {about}"


@pytest.mark.parametrize("case", ["2 ranks", "one killed"])
@pytest.mark.parametrize("name", FEW)
def test_no_idiom_is_silently_different(name: str, case: str) -> None:
    verdict, about = judge(IDIOMS[name], case)
    assert verdict in ("same bits", "rounding", "refused", "documented"), f"{verdict}: {about}"
