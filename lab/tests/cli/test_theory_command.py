import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import call
from stormtorch.theory import KINDS, predict
from stormtorch_lab.cli.tables.theory import table_rows

pytestmark = pytest.mark.pure


def test_every_number_is_shown_with_its_kind_and_a_sentence() -> None:
    code, text = call("theory", "--ranks", "64", "--loss", "0.1")
    assert code == 0
    assert "64 ranks, 10 % loss" in text
    for label, value, kind in (
        ("mean lag", "0.111 steps", "exact"),
        ("two replicas", "0.202", "exact"),
        ("as published", "0.182", "published"),
        ("owner's weight", "+11.1 %", "exact"),
        ("a1", "0.100", "exact"),
        ("a2", "0.00282", "exact"),
        ("rate", "2.070 x", "bound"),
        ("with the lead", "1,111.1", "approximate"),
    ):
        assert any([label, value, kind] == _cells(line)[:3] for line in text.splitlines()), label
    assert "fetched" not in text  # without a bound, nothing is


@pytest.mark.parametrize("loss", ["0", "0.1", "0.4"])
def test_the_answer_comes_first_and_is_that_of_the_tables(loss: str) -> None:
    code, text = call("theory", "--ranks", "16", "--loss", loss)
    assert code == 0
    found = predict(16, float(loss))
    first = text.splitlines()[0]
    assert (f"{found.lead_steps:,.0f} steps at {100 * found.p:g} % loss" in first) == (found.p > 0)
    assert found.p > 0 or first.startswith("Without loss")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.mark.parametrize("max_lag", [None, 4])
def test_the_tables_leave_no_number_out(max_lag: int | None) -> None:
    shown = [name for rows in table_rows(predict(8, 0.2, max_lag)).values() for name, *_ in rows]
    assert sorted(shown) == sorted(set(KINDS) - (set() if max_lag else {"fetched"}))


def test_noisier_gradients_are_told_as_a_smaller_batch() -> None:
    sentences = [row[-1] for rows in table_rows(predict(1000, 0.4)).values() for row in rows]
    assert any(sentence.endswith("like that of a batch of 60 %.") for sentence in sentences)


def test_lines_fit_into_eighty_columns() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stormtorch.cli", "theory", "--max-lag", "4"],
        env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "…" not in done.stdout


def test_numbers_and_kinds_are_written_as_json(tmp_path: Path) -> None:
    out = tmp_path / "theory.json"
    code, text = call("theory", "--ranks", "16", "--loss", "0.3", "--max-lag", "2", "--json", str(out))
    assert code == 0
    assert "16 ranks, 30 % loss, no copy older than 2 steps" in text
    written = json.loads(out.read_text())
    expected = predict(16, 0.3, 2)
    assert written["prediction"]["lead"] == expected.lead
    assert written["prediction"]["max_lag"] == 2
    assert written["kinds"] == {name: str(kind) for name, kind in KINDS.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("options", [("--max-lag", "4"), ("--loss", "0"), ("--loss", "0.9", "--ranks", "2")])
def test_a_picture_is_drawn_of_any_conditions(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "theory.svg"
    code, _ = call("theory", *options, "--plot", str(picture))
    assert code == 0
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--ranks", "1", "must lie in [2, 1000000], got 1"),
        ("--loss", "1", "must lie in [0, 0.9], got 1"),
        ("--loss", "nan", "must lie in [0, 0.9], got nan"),
        ("--max-lag", "0", "got 0"),
        ("--steps", "0", "got 0"),
        ("--chunks", "0", "got 0"),
        ("--json", "/dev/null/x.json", "there is no folder /dev/null"),
        ("--plot", "out.xyz", "must end with one of"),
    ],
)
def test_a_bad_value_names_the_option(option: str, value: str, problem: str) -> None:
    code, text = call("theory", option, value)
    assert code == 2
    assert option in text
    assert problem in text


@pytest.mark.parametrize("arguments", [("theory", "--help"), ("--help",), ("theory",)], ids=" ".join)
def test_it_answers_without_torch(arguments: tuple[str, ...]) -> None:
    program = (
        f"import sys; from stormtorch.cli import app as cli; sys.argv = ['stormtorch', *{arguments!r}]\n"
        "try: cli.main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "theory" in done.stdout
