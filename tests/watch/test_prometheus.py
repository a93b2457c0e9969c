"""Prometheus metrics made of records, and the dashboard that queries them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stormtorch.telemetry.metrics import METRICS
from stormtorch.telemetry.records import ProcessId, Record
from stormtorch.watch.prometheus import JobMetrics, exposition

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
LINK = {"loss": 0.1, "rtt_s": 0.04, "rate": 1e6, "path_bytes": 1472, "heard_s": 0.5}


def records(rank: int = 0, **own: Any) -> list[Record]:
    steps = {
        "kind": "steps",
        "time": 10.0,
        "step": 9,
        "steps": 5,
        "seconds": 1.5,
        "gradient_wait_s": 0.25,
        "broadcast_wait_s": 0.5,
        "arrived": 0.75,
        "gradients": {"1": 0.5},
        "broadcast": {"1": 1.0},
        "pair_drift": 1e-6,
        "owner_drift": None,
        "pair_bound": 2e-6,
        "effective_batch": 0.9,
        "variance_inflation": 1.1,
        "loss": 0.05,
        "lag": {"0": 3, "2": 1},
        "fetched": 2,
        "guarded": 1,
        "train_loss": 2.5,
    }
    links = {"kind": "links", "time": 11.0, "links": {"1": LINK}, "health": {"bytes_sent": 7, "corrupt": 3}}
    return [
        {"kind": "rank", "time": 1.0, "rank": rank, "host": 'a"b\\c\nd', "policy": "BoundedDrift", "world": 2, **own},
        {"kind": "view", "time": 1.0, "number": 2, "members": [0, 1]},
        steps,
        {**steps, "step": 14},
        {**links, "quorum": True, "cpu_s": 3.0, "waits": {"call": "backward()", "seconds": 4.0}},
        {"kind": "event", "time": 12.0, "text": "x"},
    ]


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_records_become_metrics() -> None:
    found = values(exposition({ProcessId(0, 0, 1): records()}))
    assert found['stormtorch_steps_total{rank="0"}'] == 10
    assert found['stormtorch_step{rank="0"}'] == 14
    assert found['stormtorch_wait_seconds_total{rank="0",stage="gradients"}'] == 0.5
    assert found['stormtorch_link_arrived_ratio{rank="0",peer="1",stage="gradients"}'] == 0.5
    assert found['stormtorch_link_loss_ratio{rank="0",peer="1"}'] == 0.1
    assert found['stormtorch_drift_mean_square{rank="0",between="pair"}'] == 1e-6
    assert 'stormtorch_drift_mean_square{rank="0",between="owner"}' not in found
    assert found['stormtorch_lag_steps{rank="0"}'] == 2
    assert found['stormtorch_sent_bytes_total{rank="0"}'] == 7
    assert found['stormtorch_repaired_chunks_total{rank="0"}'] == 0
    assert found['stormtorch_rejected_datagrams_total{rank="0",why="corrupt"}'] == 3
    assert found['stormtorch_waiting_seconds{rank="0"}'] == 4.0
    assert found['stormtorch_ended{rank="0"}'] == 0
    assert found['stormtorch_view_members{rank="0"}'] == 2


def test_every_metric_is_there_once_a_rank_has_told_everything() -> None:
    text = exposition({ProcessId(0, 0, 1): records()})
    assert re.findall(r"^# TYPE (\w+) ", text, re.M) == [metric.name for metric in METRICS]
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in METRICS)


def test_a_rank_that_has_told_little_has_few_metrics() -> None:
    text = exposition({ProcessId(3, 0, 1): records()[:1]})
    assert "stormtorch_info" in text
    assert "stormtorch_link" not in text
    assert exposition({}) == ""


def test_labels_are_escaped() -> None:
    assert 'host="a\\"b\\\\c\\nd"' in exposition({ProcessId(0, 0, 1): records()})


def test_the_latest_process_of_a_rank_counts_and_sums_go_on() -> None:
    job = JobMetrics()
    later = [each | {"time": each["time"] + 1000.0} for each in records()]
    job.take({ProcessId(0, 2, 9): records(), ProcessId(0, 0, 1): later[:3]})
    assert values(job.text())['stormtorch_steps_total{rank="0"}'] == 5
    job.take({ProcessId(0, 0, 1): later[3:4]})
    assert values(job.text())['stormtorch_steps_total{rank="0"}'] == 10


def test_prometheus_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    families = list(parser.text_string_to_metric_families(exposition({ProcessId(0, 0, 1): records()})))
    assert len(families) == len(METRICS)
    assert {family.type for family in families} == {"gauge", "counter"}
    (info,) = (family for family in families if family.name == "stormtorch_info")
    assert info.samples[0].labels["host"] == 'a"b\\c\nd'


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    board = json.loads((ROOT / "examples" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [each["expr"] for each in board["annotations"]["list"]]
    asked += [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    names = {name for text in asked for name in re.findall(r"stormtorch_\w+", text)}
    assert names <= {metric.name for metric in METRICS}
    assert len(names) > 20
    # Labels that a legend or a sum names must be on the metric; Prometheus adds "job".
    text = exposition({ProcessId(0, 0, 1): records()})
    labels = set(re.findall(r'(\w+)="', text)) | {"job"}
    for panel in board["panels"]:
        for target in panel["targets"]:
            used = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            used += [
                each.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for each in group.split(",")
            ]
            assert set(used) <= labels, panel["title"]


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads((ROOT / "examples" / "grafana.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
