"""What `stormtorch chaos` prints and draws, from made-up histories; and its errors."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from commands import call, text_of
from stormtorch_lab.cli.plots.chaos import COLOURS, plot_chaos
from stormtorch_lab.cli.tables.chaos import recovery_table, show_chaos, timeline_table
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.measured import Measured
from stormtorch_lab.studies.chaos.faults import KINDS, Fault
from stormtorch_lab.studies.chaos.invariants import Check
from stormtorch_lab.studies.chaos.logs import History, ProcessLog
from stormtorch_lab.studies.chaos.report import ChaosReport
from stormtorch_lab.studies.chaos.settings import ChaosSettings
from stormtorch_lab.studies.chaos.timeline import InjectedFault, Recovery

pytestmark = pytest.mark.pure


def report() -> ChaosReport:
    process_logs = []
    for host in range(3):
        process_log = ProcessLog(host, 0)
        process_log.add({"t": 100.0, "begin": 0, "host": host, "rank": host})
        for step in range(1, 200):
            process_log.add(
                {"t": 100 + step / 10, "step": step, "view": 1, "members": [0, 1, 2], "since": 0, "loss": 2.0}
            )
        process_log.add({"t": 120.0, "end": 199, "val_loss": 2.02, "digest": "ab"})
        process_logs.append(process_log)
    faults = [
        Fault(kind="kill", at_s=1, lasts_s=1, hosts=(1,)),
        Fault(kind="link", at_s=4, lasts_s=1, hosts=(0, 2), links=((0, 2),)),
        Fault(kind="kill", at_s=7, lasts_s=1, hosts=(2,)),
        Fault(kind="outage", at_s=10, lasts_s=2),
    ]
    recovered = [(1.5, 4.25), (0.1, None), (2.5, 6.75), (0.75, None)]
    return ChaosReport(
        settings=ChaosSettings(hosts=3),
        conditions={
            "requested": Conditions(loss=0.1).to_json(),
            "measured": Measured(links=[], lines=[]).to_json(),
        },
        history=History(process_logs),
        start_s=101.0,
        finish_s=118.0,
        recoveries=[
            Recovery(InjectedFault(fault, 101 + fault.at_s, 101 + fault.ends_s), *times)
            for fault, times in zip(faults, recovered, strict=True)
        ],
        planned=4,
        checks=[Check("no hang", ()), Check("no split", ())],
        undisturbed=2.0,
        folder=Path("logs"),
    )


def test_kinds_have_medians_and_worst_values_and_never_is_said() -> None:
    rows = {
        line.split()[0]: line.split()[1:] for line in text_of(recovery_table(report())).splitlines() if line.strip()
    }
    assert rows["kill"] == ["2", "2.00", "s", "2.50", "s", "5.50", "s", "6.75", "s"]
    assert rows["outage"] == ["1", "750", "ms", "750", "ms", "-", "-"]
    stopped = replace(report(), recoveries=[replace(each, pause_s=None) for each in report().recoveries])
    assert "never" in text_of(recovery_table(stopped))


def test_timeline_tells_each_fault_and_of_many_those_with_the_longest_pauses() -> None:
    text = text_of(timeline_table(report()))
    assert "link h0>h2" in text and "kill h2" in text
    own = report()
    many = replace(own, recoveries=[*own.recoveries * 20, *own.recoveries[2:3]])
    assert "the 40 faults with the longest" in text_of(timeline_table(many))


def test_verdict_is_the_last_line_and_names_what_was_violated() -> None:
    console = Console(width=200)
    with console.capture() as shown:
        show_chaos(report(), console, kept=None)
    assert shown.get().splitlines()[-1] == (
        "passed: 4 faults in 0.3 minutes, 199 steps, all 2 invariants held, validation loss +1.0% against the "
        "run without faults"
    )
    broken = replace(report(), checks=[Check("no hang", ("at 3.0 s [h2] stood still",)), Check("no split", ())])
    with console.capture() as shown:
        show_chaos(broken, console, kept=Path("/logs"))
    assert "no hang: at 3.0 s [h2] stood still" in shown.get() and "logs: /logs" in shown.get()
    assert shown.get().splitlines()[-1].startswith("failed: 4 faults in 0.3 minutes, 199 steps; 1 of 2 invariants")
    assert not replace(report(), planned=5).passed


def test_report_is_plain_data_with_the_timeline(tmp_path: Path) -> None:
    data = report().to_json()
    assert data["passed"] and data["val_loss"] == 2.02
    assert data["timeline"][1]["links"] == ["0>2"]
    assert data["timeline"][0]["pause_s"] == 1.5
    assert data["kinds"][0] == {
        "kind": "kill",
        "count": 2,
        "stopped": 0,
        "pause_median_s": 2.0,
        "pause_worst_s": 2.5,
        "return_median_s": 5.5,
        "return_worst_s": 6.75,
    }
    report().write(tmp_path / "chaos.json")
    assert (tmp_path / "chaos.json").stat().st_size > 500


def test_every_kind_has_a_colour_and_the_picture_is_drawn(tmp_path: Path) -> None:
    assert set(COLOURS) == set(KINDS)
    plot_chaos(report(), tmp_path / "chaos.svg")
    assert "kill" in (tmp_path / "chaos.svg").read_text() or (tmp_path / "chaos.svg").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--hosts", "2"), "--hosts"),
        (("--faults", "kil"), "--faults"),
        (("--minutes", "0"), "--minutes"),
        (("--policy", "none"), "--policy"),
        (("--loss", "2"), "--loss"),
        (("--rate", "fast"), "--rate"),
    ],
)
def test_bad_options_are_named_before_the_work(words: tuple[str, ...], option: str) -> None:
    code, text = call("chaos", *words)
    assert code == 2
    assert option in text


def test_folder_that_holds_files_is_not_used_for_logs(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    code, text = call("chaos", "--keep", str(tmp_path))
    assert code == 2
    assert "--keep" in text and "empty" in text
