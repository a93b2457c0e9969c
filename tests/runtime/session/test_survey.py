"""No optimizer of torch and no idiom of a training loop silently gives another result."""

import json
from pathlib import Path

import pytest

from survey_cases import CASES, judge
from survey_idioms import IDIOMS
from survey_optimizers import TORCH, subjects
from survey_page import page

pytestmark = pytest.mark.pure

FEW = (
    "p.data.clamp_()",
    "clip_grad_norm_",
    "closure",
    "GradScaler",
    "accumulation without no_sync()",
    "p.grad = p.grad * 0.5",
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TORCH)
def test_no_optimizer_of_torch_is_silently_different_when_a_rank_dies(name: str) -> None:
    verdict, about = judge(subjects("torch")[name], "one killed")
    assert verdict in ("same bits", "rounding", "refused"), f"{verdict}: {about}"


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["2 ranks", "one killed"])
@pytest.mark.parametrize("name", FEW)
def test_no_idiom_is_silently_different(name: str, case: str) -> None:
    verdict, about = judge(IDIOMS[name], case)
    assert verdict in ("same bits", "rounding", "refused", "documented"), f"{verdict}: {about}"


def test_the_page_is_made_of_the_results_that_are_kept() -> None:
    root = Path(__file__).parents[3]
    known = json.loads((root / "papers" / "benchmarks" / "survey.json").read_text())
    versions = known.pop("versions")
    known = {key: dict.fromkeys(CASES, each["all"]) if "all" in each else each for key, each in known.items()}
    assert page(known, versions) == (root / "docs" / "optimizers.md").read_text()
