"""What every function that makes tables for a terminal shows, of kept results and of small reports made up here."""

import dataclasses
import itertools
import json
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from rich.console import Console, RenderableType

from records import job_of, make_records
from stormtorch.cli.tables import doctor, ledger, postmortem
from stormtorch.cli.tables.watch import screen
from stormtorch.doctor.advice import advise, predict_cost
from stormtorch.doctor.examination import DirectedLink, Examination, Rank
from stormtorch.doctor.verdict import examine
from stormtorch.telemetry.histories import RankHistory
from stormtorch.telemetry.postmortem import find, read_flight_records
from stormtorch.theory import predict
from stormtorch.watch.snapshot_json import snapshot
from stormtorch_lab.bench.convergence import ConvergenceReport, ConvergenceSettings, Curve, Point
from stormtorch_lab.bench.ddp import DdpReport, StepResult
from stormtorch_lab.bench.latency import LatencyReport
from stormtorch_lab.bench.results import AllReduceReport, AllReduceResult
from stormtorch_lab.bench.services.colocate_results import ColocateReport
from stormtorch_lab.bench.sharing.fairness import FairnessReport
from stormtorch_lab.bench.sweep import SweepReport
from stormtorch_lab.cli.race import Race
from stormtorch_lab.cli.tables import bench, chaos, colocate, lab, simulate, steps, theory, train
from stormtorch_lab.cli.tables.virtual import virtual_table
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.measured import LinkCount, Measured
from stormtorch_lab.studies.chaos.faults import Fault
from stormtorch_lab.studies.chaos.invariants import Check
from stormtorch_lab.studies.chaos.logs import History
from stormtorch_lab.studies.chaos.report import ChaosReport
from stormtorch_lab.studies.chaos.settings import ChaosSettings
from stormtorch_lab.studies.chaos.timeline import InjectedFault, Recovery
from stormtorch_lab.studies.results import SimReport, SimResult, TrainReport, TrainResult
from stormtorch_lab.studies.settings import LmSettings, SimSettings

KEPT = Path(__file__).parents[2] / "papers" / "benchmarks"
Show = Callable[[Console], None]


def made(kind: Any, data: Any) -> Any:
    """Makes an object of plain data, as `to_json` of a report has it: what is more in the data is left out, and
    numbers that older files lack stand for themselves.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return data if data is None else made(next(each for each in get_args(kind) if each is not type(None)), data)
    if origin is list:
        return [made(get_args(kind)[0], each) for each in data]
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {
            each.name: made(hints[each.name], data.get(each.name, 12.345))
            for each in dataclasses.fields(kind)
            if each.name in data or each.default is each.default_factory is dataclasses.MISSING
        }
        return cast(Any, kind)(**known)
    return data


def kept(name: str) -> Any:
    """A file of results that are kept, with what old ones do not say."""
    found = json.loads((KEPT / f"{name}.json").read_text())
    if "conditions" in found:
        found["conditions"] = {"ranks": found["conditions"].get("hosts"), "steps": 1} | found["conditions"]
    return found


def printed(*things: RenderableType) -> Show:
    def show(console: Console) -> None:
        for each in things:
            console.print(each)

    return show


def _allreduce() -> Show:
    names = [
        path.stem for pattern in ("lab-*00mbit*", "cable-*", "allreduce-*") for path in KEPT.glob(f"{pattern}.json")
    ]
    files = [kept(name) for name in names if not name.startswith(("lab-ddp", "lab-conv", "lab-bursts", "lab-shards"))]
    files = [each for each in files if "gbit_per_s" in each["results"][0] and "cpu_s_per_gb" in each["results"][0]]
    assert len(files) > 5
    return printed(
        *(
            bench.allreduce_table(AllReduceReport(each["conditions"], made(list[AllReduceResult], each["results"]), []))
            for each in files
        )
    )


def _sweep() -> Show:
    return printed(
        *(bench.sweep_table(made(SweepReport, kept(name))) for name in ("lab-sweep", "lab-bursts-4-400mbit"))
    )


def _latency() -> Show:
    return printed(*(bench.latency_table(made(LatencyReport, kept(f"latency-{hosts}-hosts"))) for hosts in (2, 4)))


def _manners() -> Show:
    return printed(bench.fairness_table(made(FairnessReport, kept("lab-manners"))))


def _colocate() -> Show:
    names = ("lab-colocate-seeds", "lab-colocate-trainings", "lab-colocate-sweep")
    return printed(*(colocate.colocate_table(made(ColocateReport, kept(name))) for name in names))


def _ddp() -> Show:
    names = ("lab-ddp-400mbit-loss10", "lab-ddp-400mbit-loss10-cubic", "ddp-4-hosts", "ddp-cuda-4-ranks")
    return printed(
        *(
            steps.ddp_table(DdpReport(each["conditions"], made(list[StepResult], each["results"]), []))
            for each in map(kept, names)
        )
    )


def _convergence() -> Show:
    names = ("lab-convergence-400mbit-loss10", "lab-rarely-20mbit-100ms-loss5")
    return printed(
        *(
            steps.convergence_table(ConvergenceReport(each["conditions"], made(list[Curve], each["results"])))
            for each in map(kept, names)
        )
    )


def _race() -> Show:
    race = Race(ConvergenceSettings(), "4 hosts, 400 Mbit/s, 10 % loss")
    for name in ("storm-drift", "gloo-bbr", "gloo-cubic"):
        for second in range(0, 31, 10):
            race.watch(Point(backend=name, clock_s=float(second), steps=123 * second, loss=5.6 - second / 20))
    return lambda console: console.print(race.picture(console.width))


def _virtual() -> Show:
    data = kept("colocate-virtual")
    gains = [
        types.SimpleNamespace(
            requests_per_s=each["requests_per_s"],
            allowed=each["allowed"],
            best=None if each["best"] is None else types.SimpleNamespace(**each["best"]),
        )
        for each in data["gains"]
    ]
    study = types.SimpleNamespace(
        sweep=types.SimpleNamespace(
            base=types.SimpleNamespace(**data["settings"]["base"]), shares=(0.05,), more_requests=(1.0,)
        ),
        gains=lambda: gains,
        carried=lambda *_: 1234.0,
    )
    return printed(virtual_table(cast(Any, study), (0.002, 0.02)))


def _train_reports() -> list[TrainReport]:
    reports = []
    for name in ("train-lm-loss10", "train-lm-loss30"):
        data = kept(name)
        settings = {key: data["settings"][key] for key in ("ranks", "policies", "seeds", "steps", "loss")}
        settings["policies"] = tuple(settings["policies"])
        reports.append(
            TrainReport(
                LmSettings(**settings),
                data["settings"],
                data["measured"],
                data["conditions"],
                made(list[TrainResult], data["results"]),
            )
        )
    return reports


def _train() -> Show:
    def show(console: Console) -> None:
        for report in _train_reports():
            train.show_training(report, console)

    return show


def _simulate() -> Show:
    def show(console: Console) -> None:
        for report in _train_reports():
            for memory in (None, 12_345_678_901):
                settings = SimSettings(policies=report.settings.policies, seeds=report.settings.seeds, steps=200)
                more: dict[str, Any] = {"workers": 64, "lag": {0: 0.9, 1: 0.1}, "drift_curve": [], "lead": 0.111}
                more |= {"broadcast_lost": 0.1, "fetched": 123, "how": "cpu", "at_once": 64, "peak_bytes": memory}
                results = [SimResult(**dataclasses.asdict(each), **more) for each in report.results]
                requested = {"params": 117_056, "data": {"data": report.requested["data"]}}
                found = SimReport(settings, requested, report.measured, report.conditions, results)
                simulate.show_simulation(found, console)

    return show


def _theory() -> Show:
    return lambda console: theory.show_prediction(predict(64, 0.1, 4), console)


def _chaos() -> Show:
    kinds = ("kill", "pause", "link", "partition", "outage")
    faults = [
        Fault(kind=kind, at_s=10.0 * at, lasts_s=3.25, hosts=(1, 2), links=((1, 2),))
        for at, kind in enumerate(kinds, 1)
    ]
    report = ChaosReport(
        settings=ChaosSettings(hosts=5),
        conditions={"requested": Conditions(loss=0.1).to_json(), "measured": Measured(links=[], lines=[]).to_json()},
        history=History([]),
        start_s=100.0,
        finish_s=160.0,
        recoveries=[
            Recovery(
                InjectedFault(fault, 100 + fault.at_s, 100 + fault.ends_s), 1.25, 12.5 if fault.kind != "link" else None
            )
            for fault in faults
        ],
        planned=5,
        checks=[
            Check("exact parameters are the same bits on all members of a view", ()),
            Check("no two sides of a divided network train", ("at 3.0 s [h2] and [h3]",)),
        ],
        undisturbed=2.0,
        folder=Path("logs"),
    )
    return lambda console: chaos.show_chaos(report, console, kept=Path("logs"))


def _examined(world: int, host: Callable[[int], str]) -> Examination:
    ranks = {
        each: Rank(
            rank=each,
            host=host(each),
            address=f"198.18.0.{each + 1}",
            port=4000 + each,
            tcp_port=5000,
            mtu=1500,
            asked_buffer=8 << 20,
            receive_buffer=8 << 20,
            versions={"stormtorch": "1.0", "torch": "2.13.0", "python": "3.11.7"},
        )
        for each in range(world)
    }
    links = {
        (source, target): DirectedLink(
            source=source,
            target=target,
            received=(source, target) != (0, 1),
            tcp=True,
            lost="0000000001" * 200 if target == world - 1 else "0" * 2000,
            round_trips_s=(1.234e-1,) * 20 + (2.345e-1,) * 20,
            clock_ahead_s=0.0,
            seen=f"198.18.0.{source + 1}",
            path_bytes=1500,
            rate_bits=9.87e8,
            sent_bits=1e9,
            duplicates=source,
            reordered=12 * target,
            overflowed=345 * (source == 1),
        )
        for source, target in itertools.permutations(range(world), 2)
    }
    return Examination(world=world, ranks=ranks, links=links)


def _doctor() -> Show:
    def show(console: Console) -> None:
        for world, host in ((2, "h{}"), (7, "worker-{}.example.org"), (12, "gpu-node-of-the-cluster-{}")):
            found = _examined(world, host.format)
            advice = advise(found, None)
            doctor.show_network(
                found, examine(found), advice, predict_cost(found, 25_000_000), console, captured=Path("kept")
            )

    return show


def _lab() -> Show:
    links = [LinkCount(*pair, 123_456, 12_345) for pair in itertools.permutations(range(8), 2)]
    return lambda console: lab.show_after(Measured(links=links, lines=[]), [0] * 7 + [137], console)


def _ledger() -> Show:
    steps_of = {"step": 9, "steps": 10, "seconds": 1.234, "gradient_wait_s": 0.234, "broadcast_wait_s": 0.123}
    steps_of |= {"view_wait_s": 0.012, "bytes_sent": 123_456_789, "arrived": 0.8765, "pair_drift": 1.2e-6}
    accounts = [
        RankHistory(
            name,
            rank,
            entries=[steps_of | {"pair_bound": 2.3e-6, "gradients": {"1": 0.61, "2": 0.87}}],
            links={"1": {"loss": 0.39, "rtt_s": 0.123}},
        )
        for rank, name in enumerate(("rank 0", "rank 1", "ledger-of-the-first-day.jsonl"))
    ]
    return lambda console: ledger.show_histories(accounts, console)


def _postmortem() -> Show:
    def operation(number: int, name: str, shape: list[int]) -> dict[str, Any]:
        more = {"shapes": [shape] * 3, "dtype": "bfloat16", "bytes": 123_456_789, "started": 100.0 + number}
        return {"sequence": number, "collective": number, "operation": name, "ended": 101.5 + number, **more}

    with tempfile.TemporaryDirectory() as folder:
        for rank in range(8):
            last = "lossy_reduce_scatter" if rank == 3 else "all_gather_into_tensor"
            content = {"job": "1", "group": "world", "rank": rank, "ranks": list(range(9)), "time": 200.0}
            done = [operation(1, "all_reduce", [4096, 1024]), operation(2, last, [123, 45, 6789])]
            path = Path(folder, f"storm-flight-world-rank{rank}-1.json")
            path.write_text(json.dumps(content | {"error": f"rank {rank}: timed out", "operations": done}))
        findings = find(read_flight_records([Path(folder)]))
    return lambda console: postmortem.show_failures(findings, console)


def _watch() -> Show:
    job = job_of(make_records(8, loss=lambda sender, receiver: 0.123 if receiver == 3 else 0.001))
    return printed(screen(snapshot(job, job.arrived + 1.0, "runs/today")))


SHOWN: dict[str, Callable[[], Show]] = {
    "race._table": _race,
    "tables.bench.allreduce_table": _allreduce,
    "tables.bench.latency_table": _latency,
    "tables.bench.fairness_table": _manners,
    "tables.bench.sweep_table": _sweep,
    "tables.chaos.invariant_table": _chaos,
    "tables.chaos.recovery_table": _chaos,
    "tables.chaos.timeline_table": _chaos,
    "tables.colocate.colocate_table": _colocate,
    "tables.doctor._matrix": _doctor,
    "tables.doctor._show_links": _doctor,
    "tables.lab._matrix": _lab,
    "tables.ledger.links_table": _ledger,
    "tables.ledger.ranks_table": _ledger,
    "tables.postmortem.operations_table": _postmortem,
    "tables.simulate.policy_table": _simulate,
    "tables.steps.convergence_table": _convergence,
    "tables.steps.ddp_table": _ddp,
    "tables.theory.show_prediction": _theory,
    "tables.train.policy_table": _train,
    "tables.virtual.virtual_table": _virtual,
    "tables.watch._links": _watch,
    "tables.watch._notes": _watch,
    "tables.watch._ranks_table": _watch,
    "tables.watch._worst": _watch,
}
"""By the function in `stormtorch.cli` that makes a table: what shows it. The test finds functions that are missing."""
LEAVE_OUT = (_watch,)
"""Tables that may leave out columns in a narrow terminal: those of `watch`."""
