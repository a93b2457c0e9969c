"""What users type and write by mistake: each gets one clear message, within seconds, on the rank that matters.

Three tables: of commands, of calls in one process, and of calls on several ranks (tests/helpers/wrong_inputs.py). With
WRONG_INPUTS_TABLE=FILE in the environment, messages and seconds are added to a file as rows of a table.
"""
# mypy: disable-error-code="no-untyped-call, attr-defined"

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import stormtorch
from backend_job import Job, free_ports
from commands import call
from stormtorch import BoundedDrift, ElasticSampler, ModelAveraging, Options

SECONDS = 10.0
"""Longest time without a word."""


def note(wrong: str, message: str, seconds: float) -> None:
    if path := os.environ.get("WRONG_INPUTS_TABLE"):
        cells = (wrong, message, f"{seconds:.1f}")
        with Path(path).open("a", encoding="utf-8") as table:
            table.write("| " + " | ".join(re.sub(r"\s+", " ", each).replace("|", "\\|") for each in cells) + " |\n")


# --- commands ---------------------------------------------------------------------------------------------------------

FILES = {
    "garbage.json": '{"links": [[',
    "garbage.jsonl": "garbage\n",
    "other.py": "class Other: pass\n",
    "broken.py": "def (:\n",
    "tiny.txt": "too little text\n",
}

COMMANDS = {
    "theory --loss 1.5": "--loss: must lie in [0, 0.9], got 1.5",
    "theory --loss abc": "'--loss': Input should be a valid number",
    "theory --ranks -4": "--ranks: must lie in [2, 1000000], got -4",
    "theory --json nowhere/out.json": "--json: there is no folder nowhere: create it",
    "simulate --json .": "'--json': file '.' is a directory",
    "simulate --plot picture.txt": "--plot: must end with one of",
    "simulate --policy nosuch": "--policy: must be one of lossless, plain, lead",
    "simulate --policy missing.py:Mine": "--policy: there is no Python file missing.py",
    "simulate --policy other.py:Mine": "--policy: other.py has no class Mine",
    "simulate --policy other.py:Other": "--policy: derive Other in other.py from stormtorch.OwnerPolicy",
    "simulate --policy broken.py:Mine": "--policy: broken.py cannot be imported: SyntaxError",
    "simulate --per-link garbage.json": "--per-link: must be JSON: garbage.json",
    "simulate --per-link missing.json": "--per-link: cannot be read: missing.json: No such file",
    "simulate --trace garbage.jsonl": "--trace: cannot be used: garbage.jsonl, line 0: must be JSON, got 'garbage'",
    "simulate --trace missing.jsonl": "--trace: cannot be read: missing.jsonl: No such file",
    "simulate --model nosuch": "--model: must be one of llama",
    "train lm --ranks 0": "--ranks: must lie in [2, 64], got 0",
    "train lm --data missing.txt": "--data: cannot read missing.txt: No such file",
    "train lm --data tiny.txt": "--data: must have at least 200,000 bytes; tiny.txt has 16",
    "train image --data .": "--data: must be a folder with the Python version's batches",
    "train lm --wire float8": "'float8' is not one of 'float32', 'bfloat16', 'float16', 'int8', 'int4'",
    "train lm --policy lead --every 4": "--every: belongs to model-averaging, area, diloco",
    "bench allreduce --mb abc": "--mb: must be numbers separated by commas, got 'abc'",
    "bench allreduce --rate 400foo": "--rate: must be a rate such as 400mbit",
    "bench allreduce --backends nosuch": "--backends: must be one of storm",
    "lab run": "Missing argument 'COMMAND'",
    "lab run --delay 20 -- true": "--delay: must be a time such as 20ms",
    # By a name that no lab has: without one, the command would change a lab that runs beside this test.
    "lab set --lab nosuch --loss 0.1": "no lab 'nosuch' is running",
    "chaos --faults nosuch": "--faults: must be one of kill",
    "nosuch": "No such command 'nosuch'",
}


@pytest.mark.pure
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_option_and_what_it_takes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    code, text = call(*command.split())
    shown = re.sub(r"\s+", " ", re.sub(r"[╭╮╰╯│─]+", " ", text))
    note(f"`stormtorch {command}`", shown.rpartition("Error ")[2].strip(), time.monotonic() - began)
    assert COMMANDS[command] in shown
    assert code in (1, 2)
    assert "Traceback" not in text


# --- calls in one process ---------------------------------------------------------------------------------------------


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    'Options(key=b"secret")': (lambda: Options(key=b"secret"), ValueError, "at least 16 bytes, got 6: `stormtorch key"),
    'Options(key="text")': (lambda: Options(key="a" * 20), ValueError, "must be bytes, got str: call .encode()"),  # type: ignore[arg-type]
    'Options(key=b"a" * 20)': (lambda: Options(key=b"a" * 20), ValueError, "at least 8 different bytes, got 1"),
    'Options(rate="fast")': (lambda: Options(rate="fast"), ValueError, 'or "auto", "low" or "unlimited"'),
    "Options(port=70000)": (lambda: Options(port=70000), ValueError, "port must lie in [0, 65535], got 70000"),
    "Options(datagram_bytes=9)": (lambda: Options(datagram_bytes=9), ValueError, "must lie in [256, 65507], got 9"),
    'Options(rejoin="yes")': (lambda: Options(rejoin="yes"), ValueError, 'rejoin must be True, False or "auto"'),  # type: ignore[arg-type]
    "faults(loss=2)": (lambda: stormtorch.faults(loss=2.0), ValueError, "loss must lie in [0, 1], got 2.0"),
    "BoundedDrift(lead=-1)": (lambda: BoundedDrift(lead=-1.0), ValueError, "lead must"),
    "BoundedDrift(wire=torch.float64)": (lambda: BoundedDrift(wire=torch.float64), ValueError, "wire must"),
    "ModelAveraging(every=0)": (lambda: ModelAveraging(every=0), ValueError, "every must"),
    "ElasticSampler(10, batch_size=0)": (lambda: ElasticSampler(10, batch_size=0), ValueError, "batch_size"),
    "prepare() before init_process_group": (
        lambda: stormtorch.prepare(model := linear(), torch.optim.SGD(model.parameters())),
        ValueError,
        'prepare() comes after dist.init_process_group("storm")',
    ),
    "exact(model) without prepare": (
        lambda: stormtorch.exact(linear()),
        ValueError,
        "is not prepared: call stormtorch",
    ),
    'join("nohost")': (lambda: stormtorch.join("nohost"), ValueError, "host:port"),
    "stormtorch.prepair": (lambda: stormtorch.prepair, AttributeError, "has no attribute 'prepair'"),
}


@pytest.mark.pure
@pytest.mark.parametrize("wrong", CALLS)
def test_a_call_says_what_it_wants(wrong: str) -> None:
    work, kind, message = CALLS[wrong]
    began = time.monotonic()
    with pytest.raises(kind) as error:
        work()
    note(f"`{wrong}`", str(error.value), time.monotonic() - began)
    assert message in str(error.value)


# --- calls on several ranks -------------------------------------------------------------------------------------------

Told = dict[str, Any]

TOGETHER = {
    "before init_process_group": 'comes after dist.init_process_group("storm")',
    "on gloo": 'needs a group of the backend "storm", got gloo',
    "wrong order": "the model comes first, then its optimizer, got SGD and Sequential",
    "optimizer of another model": "the optimizer has none of the model's parameters",
    "policy by name": "policy must be one of the library's, as BoundedDrift() or DiLoCo(), or",
    "float64": "parameter 0 is torch.float64: only float32, bfloat16 and float16",
    "complex": "parameter 0 is torch.complex64: only float32, bfloat16 and float16",
    "LBFGS": "LBFGS evaluates the model in the middle of a step",
    "SparseAdam": "SparseAdam needs sparse gradients, which are not supported: use Adam",
    "all frozen": "the optimizer has no parameter that requires a gradient",
    "DDP before": "prepare() takes the place of DistributedDataParallel",
    "exact without prepare": "call stormtorch.prepare(model, optimizer) first",
    "prepare twice": "the optimizer is prepared already",
    "another optimizer": "a parameter of this optimizer is prepared already",
    "optimizer made after prepare": "this SGD has parameters that are prepared with another optimizer, which alone",
    "DDP after": "prepare() takes the place of DistributedDataParallel",
    "model.module": "Use model where a script for DDP has model.module",
    "add_param_group": "add_param_group after prepare(): give the optimizer all its parameters before",
    "assign": "load_state_dict(assign=True) replaces parameters that are prepared",
}

# Of each scenario: what the first rank is told, and what the second; a dash where a rank does nothing wrong.
RANKS: dict[str, tuple[str, str]] = {
    "different_models": (
        "rank 1 has prepared another model than rank 0",
        "0.weight is float32 [9, 8], and float32 [8, 8] elsewhere",
    ),
    "different_optimizers": ("rank 1 has prepared another optimizer than rank 0: class is ",) * 2,
    "different_policies": ("rank 1 has prepared another policy than rank 0",) * 2,
    "different_rates": ("lr of parameter group 0 is 0.1 on rank 0, 1.1 on rank 1",) * 2,
    "different_keys": (
        "rank 0 and rank 1 have different keys",
        "the same on every rank, in Options or in STORM_KEY",
    ),
    "key_on_one_rank": ("rank 0 and rank 1 have different keys", "rank 1 and rank 0 have different keys"),
    "short_key": ("rank 1 could not join the job: ValueError: key must have", "key must have at least 16 bytes, got 6"),
    "unknown_interface": ("rank 1 could not join the job", "interface 'nosuch0' does not exist or has no address"),
    "port_in_use": (
        "rank 1 could not join the job",
        "Address already in use, at 127.0.0.1: does another rank use this port",
    ),
    "world_size": ("rank 1 could not join the job", "rank 1 was started as one of 3 ranks, but rank 0 as one of 2"),
    "another_version": ("rank 1 could not join the job", "rank 1 runs stormtorch 9.9.9, but rank 0 runs"),
    "rank_too_high": ("rank 1 of 2 has not joined within 4 s", "rank must lie in [0, world), got rank 5 of 2"),
    "options_of_another_kind": ("pg_options must be a stormtorch.Options, got dict", "-"),
    "after_the_end": ("rank 0: reduce_scatter: the engine is closed", "rank 1: reduce_scatter: the engine is closed"),
    "forked": ("which is the rank, and is not in the job", "-"),
    "unfrozen": ("that was frozen when the model was prepared now requires a gradient",) * 2,
    "moved": ("was moved after prepare(), as model.to(), model.half()",) * 2,
}
SLOW = ("prepare_on_one_rank", "backward_on_one_rank")


def told_by(scenario: str, world: int = 2) -> list[dict[str, Told]]:
    """Runs a scenario; returns, for each rank, what it was told by each mistake."""
    ports = free_ports(1 + world)
    # The store outlives the ranks, as torchrun's does: no rank loses it because another one has ended.
    store = TCPStore("127.0.0.1", ports[0], is_master=True, wait_for_workers=False)
    environment = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with Job("wrong_inputs.py", scenario, world, ports, **environment) as job:
        ranks = job.end(60.0)
    del store
    assert all(each["exit"] == 0 for each in ranks), [each["stderr"] for each in ranks]
    told = [{name: each for name, each in rank.items() if isinstance(each, dict)} for rank in ranks]
    for rank, mistakes in enumerate(told):
        for name, each in mistakes.items():
            said = "; ".join([f"warning: {text}" for text in each["warnings"]] + [each["error"]])
            note(f"{name} (rank {rank})", said or "works", each["seconds"])
    return told


def test_all_ranks_are_told_what_prepare_refuses() -> None:
    for rank in told_by("refusals"):
        assert set(rank) == set(TOGETHER)
        for name, message in TOGETHER.items():
            assert message in rank[name]["error"], name
            assert rank[name]["seconds"] < SECONDS


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", RANKS)
def test_the_rank_that_matters_is_told(scenario: str) -> None:
    for rank, message in zip(told_by(scenario), RANKS[scenario], strict=True):
        if message != "-":
            (told,) = rank.values()
            assert message in told["error"]
            assert told["seconds"] < SECONDS


def test_tensors_of_different_shapes_are_told_to_both_ranks() -> None:
    # Either rank may notice it first, and then tells the other.
    for rank in told_by("different_shapes"):
        error = rank["different shapes"]["error"]
        assert re.search(
            r"rank \d sends 40[04] bytes where 40[04] are|sends another number of bytes than expected", error
        )


@pytest.mark.thorough
@pytest.mark.xfail(strict=False, reason="in half of the runs prepare() gives no warning; why is not understood yet")
def test_a_rank_that_ended_without_prepare_is_named_by_those_that_go_on() -> None:
    (told,) = told_by("never_prepared")[0].values()
    assert told["error"] == ""
    (warning,) = told["warnings"]
    assert "rank 1 is gone since before prepare(): training begins with 1 rank. Has every rank called" in warning


@pytest.mark.thorough
def test_sparse_gradients_travel_dense() -> None:
    for rank in told_by("sparse_gradients"):
        assert rank["sparse gradients"]["error"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SLOW)
def test_a_call_on_one_rank_says_after_ten_seconds_whom_it_waits_for(scenario: str) -> None:
    (told,) = told_by(scenario)[0].values()
    assert any("rank 0 has waited 10 s in" in each and "rank 1 computes or does" in each for each in told["warnings"])
    assert "waiting for rank 1" in told["error"] and "Has every rank made this call?" in told["error"]


@pytest.mark.slow
def test_a_rank_that_is_started_twice_is_asked_about_it() -> None:
    *first, second = told_by("rank_twice", world=3)
    assert all(each["rank twice"]["error"] == "" for each in first)
    told = second["rank twice"]
    assert "was no rank started twice?" in told["warnings"][0]
    assert "rank 0 of 2 has not joined" in told["error"]
