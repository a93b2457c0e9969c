"""Programs with several sessions, or several exchanges per step, survive ranks that join and leave at any moment."""

import pytest

from stormtorch import EXACT, GradientAveraging
from training_loops import Gan, Halves, Together, TrainingLoop, Twice, play
from views import all_same

EVENTS = [pytest.param(each, marks=pytest.mark.thorough) for each in ("death", "leave", "join")] + [
    pytest.param("return")
]
PROGRAMS = (Gan, Halves, Together, Twice)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_of_any_program_come_and_go(
    program: type[TrainingLoop], event: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, longest = play(program, event)
    assert all_same(found)
    if event == "join":
        assert "earlier backwards" not in caplog.text, "who waits for a turn to begin costs nobody anything"
    if event == "leave":
        assert max(longest.values()) < 1.5, "nobody has waited for a silence of 2 s"


@pytest.mark.parametrize("event", ["return", "join"])
@pytest.mark.parametrize("program", [Gan, Twice])
def test_a_newcomer_under_gradient_averaging_has_the_others_optimizer_state(
    program: type[TrainingLoop], event: str
) -> None:
    found, _ = play(program, event, policy=GradientAveraging(reliability=EXACT))
    assert all_same(found)
