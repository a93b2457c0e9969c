import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from commands import ENVIRONMENT, STORMTORCH, call, ranks_left
from stormtorch import Options, __version__
from stormtorch_lab.bench import replicas
from stormtorch_lab.bench.backends import BACKENDS, DTYPES, LAB_DEFAULT
from stormtorch_lab.bench.services.colocate import TRAININGS
from stormtorch_lab.bench.sharing.fairness_results import FAIRNESS_CHECKS
from stormtorch_lab.bench.suite import PARTS
from stormtorch_lab.cli.plots.train import COLOURS
from stormtorch_lab.cli.terminal import choices
from stormtorch_lab.policies.presets import PRESETS, WIRES, names
from stormtorch_lab.studies.chaos.faults import KINDS
from stormtorch_lab.studies.settings import PRECISIONS, LmSettings, SimSettings
from stormtorch_lab.tasks.kinds import TASKS


def test_version_and_help_answer() -> None:
    assert call("--version") == (0, f"stormtorch {__version__}\n")
    for command in (
        (),
        ("bench",),
        ("chaos",),
        ("demo",),
        ("doctor",),
        ("keygen",),
        ("report",),
        ("ledger",),
        ("postmortem",),
        ("simulate",),
        ("theory",),
        ("train", "lm"),
        ("train", "image"),
        ("watch",),
        ("bench", "allreduce"),
        ("bench", "ddp"),
        ("bench", "convergence"),
        ("bench", "sweep"),
        ("bench", "latency"),
        ("bench", "all"),
    ):
        code, text = call(*command, "--help")
        assert code == 0
        assert "Usage" in text
        if command != ("bench",):
            assert "Examples" in text


def test_keygen_prints_another_strong_key_each_time() -> None:
    keys = [call("keygen") for _ in range(2)]
    assert keys[0] != keys[1]
    for code, text in keys:
        assert code == 0
        assert len(bytes.fromhex(text.strip())) == 32
        Options(key=text.strip().encode())


def test_what_help_lists_is_what_exists() -> None:
    assert tuple(choices.BACKENDS.split(",")) == BACKENDS
    assert tuple(choices.LAB_BACKENDS.split(",")) == LAB_DEFAULT
    assert tuple(choices.DDP_BACKENDS.split(",")) == replicas.DEFAULT
    assert tuple(choices.LAB_DDP_BACKENDS.split(",")) == replicas.LAB_DEFAULT
    assert tuple(choices.FAULTS.split(",")) == KINDS
    assert tuple(choices.FAIRNESS_CHECKS.split(",")) == FAIRNESS_CHECKS
    assert tuple(choices.NEIGHBOURS.split(",")) == TRAININGS
    assert tuple(choices.SUITE.split(",")) == PARTS
    assert [each.value for each in choices.Dtype] == list(DTYPES)
    assert tuple(choices.PRESETS.split(",")) == PRESETS == tuple(COLOURS)
    assert tuple(choices.POLICIES.split(",")) == names()
    assert tuple(choices.TRAIN_POLICIES.split(",")) == LmSettings().policies
    assert tuple(choices.SIMULATE_POLICIES.split(",")) == SimSettings().policies
    assert choices.WIRES.split(",") == [each.value for each in choices.Wire] == list(WIRES)
    assert tuple(choices.MODELS.split(",")) == TASKS
    assert tuple(each.value for each in choices.Precision) == PRECISIONS


OLD_SPELLINGS = ("--policies", "--wires", "--hosts", "--params ", "--patience ", "--text", "--cifar10", "bounded-drift")


@pytest.mark.parametrize(
    "command",
    [
        ("train", "lm"),
        ("train", "image"),
        ("simulate",),
        ("theory",),
        ("demo",),
        ("bench", "allreduce"),
        ("bench", "ddp"),
        ("bench", "convergence"),
        ("bench", "sweep"),
        ("bench", "latency"),
        ("bench", "manners"),
        ("bench", "colocate"),
        ("bench", "colocate-virtual"),
    ],
    ids=" ".join,
)
def test_a_setting_has_one_name_in_all_commands(command: tuple[str, ...]) -> None:
    code, text = call(*command, "--help")
    assert code == 0
    assert [old for old in OLD_SPELLINGS if old in text] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--ranks", "1", "must lie in [2, 64], got 1"),
        ("--ranks", "many", "int"),
        ("--mb", "1,x", "must be numbers separated by commas, got '1,x'"),
        ("--mb", "-3", "got -3"),
        ("--iters", "0", "got 0"),
        (
            "--backends",
            "storm,nccl",
            "must be one of storm, storm-lossy, gloo, storm-one-lane, mpi, gloo-bbr, gloo-cubic, storm-flat, "
            "got 'nccl'",
        ),
        ("--backends", "storm,gloo-bbr", "has gloo-bbr only in a lab; here it must be one of storm, storm-lossy, gloo"),
        ("--faults", "1.5", "must lie in [0, 0.9], got 1.5"),
        ("--rate", "fast", "must be a rate such as 400mbit"),
        ("--loss", "1.5", "must lie in [0, 1], got 1.5"),
        ("--burst", "8", "needs a --loss that comes in bursts"),
        ("--burst", "5ms", "needs a --loss that comes in bursts"),
        ("--delay", "20", "must be a time such as 20ms"),
        ("--jitter", "1ms", "needs a delay to vary"),
        ("--queue", "1b", "must lie in"),
        ("--patience-s", "0", "got 0"),
        ("--dtype", "int8", "int8"),
        ("--datagram-bytes", "9", "must lie in [256, 65507], got 9"),
        ("--json", "/dev/null/x.json", "there is no folder /dev/null"),
        ("--plot", "out.xyz", "must end with one of"),
        ("--timeout-s", "0", "got 0"),
    ],
)
def test_a_bad_value_names_the_option_and_exits_with_2(option: str, value: str, problem: str) -> None:
    code, text = call("bench", "allreduce", option, value)
    assert code == 2
    assert option in text
    assert problem in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "ddp", "--params-m", "0"),
        ("bench", "ddp", "--tokens", "0"),
        ("bench", "ddp", "--wire", "float32,float8"),
        ("bench", "ddp", "--steps", "0"),
        ("bench", "ddp", "--backends", "gloo-bbr"),
        ("bench", "ddp", "--loss", "2"),
        ("bench", "ddp", "--plot", "out.xyz"),
        ("bench", "convergence", "--seconds", "0"),
        ("bench", "convergence", "--width", "65"),
        ("bench", "convergence", "--backends", "gloo-bbr"),
        ("bench", "convergence", "--plot", "out.xyz"),
        ("bench", "latency", "--idle-s", "0"),
        ("bench", "sweep", "--rates", "400mbit,fast"),
        ("bench", "sweep", "--losses", "0.1,2"),
        ("bench", "sweep", "--losses", "none"),
        ("bench", "sweep", "--delays", "soon"),
        ("bench", "sweep", "--ideal-s", "0"),
        ("bench", "sweep", "--backends", "nccl"),
        ("demo", "--loss", "0.6"),
        ("demo", "--seconds", "0.5"),
        ("demo", "--ranks", "9"),
        ("demo", "--rate", "fast"),
        ("demo", "--rate", "unlimited"),
        ("demo", "--delay", "soon"),
        ("demo", "--page", "/dev/null/x.html"),
    ],
)
def test_the_other_commands_refuse_bad_values_alike(command: tuple[str, ...]) -> None:
    code, text = call(*command)
    assert code == 2
    assert command[-2] in text


@pytest.mark.thorough
def test_a_benchmark_prints_a_table_and_writes_json_and_plot(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    options = ("--mb", "1", "--iters", "2", "--warmup", "1", "--backends", "storm,gloo", "--dtype", "bfloat16")
    done = subprocess.run(
        [*STORMTORCH, "bench", "allreduce", *options, "--json", str(out), "--plot", str(picture)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A busy machine takes a while to start.
    assert all(line.startswith("starting 2 processes") for line in done.stderr.splitlines()), done.stderr
    assert "all-reduce of bfloat16 over 2 ranks" in done.stdout
    assert [each["backend"] for each in json.loads(out.read_text())["results"]] == ["storm", "gloo"]
    assert "<svg" in picture.read_text()


@pytest.mark.thorough
def test_a_failing_rank_is_shown_once_and_exits_with_1() -> None:
    done = subprocess.run(
        [*STORMTORCH, "bench", "allreduce", "--iters", "100000", "--timeout-s", "6"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("timed out after 6 s, waiting for rank 0, 1") == 1
    assert "Traceback" not in done.stderr


def start_endless() -> tuple["subprocess.Popen[str]", list[int]]:
    """A benchmark without end, in a process group of its own, as a terminal would start it."""
    process = subprocess.Popen(
        [*STORMTORCH, "bench", "allreduce", "--mb", "1", "--iters", "1000000", "--timeout-s", "100"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    give_up_at = time.monotonic() + 60
    while len(children := ranks_left(process.pid)) < 2:
        assert process.poll() is None
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    return process, children


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # it may take a while until an orphan is reaped


def gone(processes: list[int], within_s: float) -> bool:
    give_up_at = time.monotonic() + within_s
    while any(alive(each) for each in processes):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("delay_s", [0.0, 8.0], ids=["while ranks start", "while rounds run"])
def test_ctrl_c_ends_the_ranks_and_exits_with_130(delay_s: float) -> None:
    process, children = start_endless()
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted: all ranks were stopped\n"
    assert gone(children, within_s=0)


@pytest.mark.thorough
def test_ranks_end_when_their_parent_is_killed() -> None:
    process, children = start_endless()
    process.kill()
    process.communicate(timeout=30)
    assert gone(children, within_s=30)
