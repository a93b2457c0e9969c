"""Runs PyTorch's own DistributedTest, which ships in the wheel, on a backend.

    python tests/helpers/run_distributed_test.py --world 2 [--backend gloo] [--loss 0.05] [--only NAME] [--json FILE]

Its gates are gloo's: it is imported as gloo's test and then told another name. (`--gates mpi --only all_to_all` runs
what those keep out.) Prints what passed, failed and was skipped.
"""
# mypy: disable-error-code="no-untyped-call"

import argparse
import atexit
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import FunctionType
from typing import Any


def unlock(dist: Any) -> None:
    """Opens the two doors that torch's own backends pass by their literal name, for any backend that can do it.

    `dist.monitored_barrier` refuses every group that is not gloo's: a group that has the method gets the call. And the
    tests of `no_sync` have a branch for the CPU that only "gloo" and "mpi" enter (see `DistributedTests` below).
    """
    theirs = dist.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = group or dist.group.WORLD
        if isinstance(getattr(type(chosen), "monitored_barrier", None), FunctionType):  # written in Python: not torch's
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            theirs(group, timeout, wait_all_ranks)

    dist.monitored_barrier = monitored_barrier


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--backend", default="storm")
    parser.add_argument("--gates", default="gloo", help="whose gates; mpi's let pass all_to_all, which gloo's do not")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of datagrams to lose, injected")
    parser.add_argument("--only", default="", help="words, separated by commas; tests whose name has one of them")
    parser.add_argument("--json", type=Path, help="where to write the names of what passed, failed and was skipped")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no test after so long")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="storm-distributed-test-")
    runner = os.getpid()  # the ranks are forked, and share the folder
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == runner else None)
    os.environ |= {
        "BACKEND": arguments.gates,
        "WORLD_SIZE": str(arguments.world),
        "INIT_METHOD": f"file://{folder}/shared",
        "TEMP_DIR": folder,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    Path(folder, "barrier").mkdir()
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = arguments.backend
    unlock(dist)
    # Its children are forked, so the class need not be found again by name.
    base: Any = distributed_test.DistributedTest._DistTestBase

    class DistributedTests(distributed_test.TestDistBackend, base):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def _test_accumulate_gradients_no_sync(self, *args: Any, **settings: Any) -> None:
            # The group exists already; from here on the name only chooses between CPU and GPU.
            assert dist.get_backend() == arguments.backend
            distributed_test.BACKEND = "gloo"
            super()._test_accumulate_gradients_no_sync(*args, **settings)

    names = unittest.TestLoader().getTestCaseNames(DistributedTests)
    wanted = [word for word in arguments.only.split(",") if word]
    if arguments.loss:
        from stormtorch import faults

        # Before the fork: faults strike in every process that receives.
        faults(loss=arguments.loss).__enter__()
    outcome: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": [], "left": []}
    begin = time.monotonic()
    for name in names:
        if wanted and not any(word in name for word in wanted):
            continue
        if time.monotonic() - begin > arguments.seconds:
            outcome["left"].append(name)
            continue
        result = unittest.TestResult()
        started = time.monotonic()
        DistributedTests(name).run(result)
        kind = "skipped" if result.skipped else "passed" if result.wasSuccessful() else "failed"
        outcome[kind].append(name)
        if kind != "skipped":
            print(f"{kind:7} {time.monotonic() - started:6.1f} s  {name}", flush=True)
        for _, text in result.failures + result.errors:
            print("    " + "\n    ".join(text.strip().splitlines()[-6:]), flush=True)
    print({kind: len(each) for kind, each in outcome.items()})
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"world": arguments.world, "backend": arguments.backend, "loss": arguments.loss} | outcome)
        )
    return 1 if outcome["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
