"""torchrun across hosts whose network loses packets: the command in docs/frameworks.md, verbatim."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from example_runs import EXAMPLES, verdict
from stormtorch_lab.netns.fixtures import lab_or_skip

pytestmark = pytest.mark.lab
LAB_RUN = (sys.executable, "-m", "stormtorch.cli", "lab", "run", "--hosts", "4", "--rate", "100mbit", "--loss", "0.1")


@pytest.mark.slow
def test_torchrun_trains_on_four_hosts_through_real_loss(tmp_path: Path) -> None:
    lab_or_skip()
    log = tmp_path / "lab.json"
    torchrun = (sys.executable, "-m", "torch.distributed.run", str(EXAMPLES / "ddp.py"))
    options = ("--management", "--timeout-s", "100", "--json", str(log))
    done = subprocess.run(
        [*LAB_RUN, *options, "--", *torchrun],
        capture_output=True,
        text=True,
        check=False,
        timeout=115,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    ranks, accuracy, replicas = verdict(done.stdout)
    assert (ranks, replicas) == (4, "identical")
    assert accuracy > 80
    told = json.loads(log.read_text(encoding="utf-8"))
    assert told["statuses"] == [0, 0, 0, 0]
    # The rendezvous uses the management network, so all packets are storm's; every link lost some.
    links = told["measured"]["links"]
    assert len(links) == 12 and all(link["seen"] > 300 and link["lost"] > 0 for link in links), links
    assert told["measured"]["loss"] == pytest.approx(0.1, abs=0.02)
