"""Tries an installed stormtorch in a few seconds: the commands, a training of two ranks, and the lab where it is there.

    python try_wheel.py

Runs with whatever Python has stormtorch installed, and needs nothing else: no compiler, no pytest, no other file.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

TRAINING = """
import torch
import torch.distributed as dist

import stormtorch

dist.init_process_group("storm")
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = stormtorch.prepare(model, optimizer)
with stormtorch.faults(loss=0.1, seed=1):
    for _ in range(20):
        torch.nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with stormtorch.exact(model):
        digest = sum(float(each.double().sum()) for each in model.parameters())
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {optimizer.session.steps} steps, digest {digest!r}")
dist.destroy_process_group()
"""


def run(*command: str) -> str:
    """What a command prints; an error that shows it all if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    version = run(str(scripts / "stormtorch"), "--version").strip()
    key = run(str(scripts / "stormtorch"), "keygen").strip()
    assert re.fullmatch(r"[0-9a-f]{64}", key), f"keygen printed {key!r}"
    place = run(sys.executable, "-c", "import stormtorch._engine as engine; print(engine.__file__)").strip()

    if find_spec("stormtorch_lab"):
        # Without arguments the relay says how it is called. What matters is that it can be loaded and runs.
        relay = subprocess.run([scripts / "stormtorch-relay"], capture_output=True, text=True, check=False, timeout=60)
        assert relay.returncode in (1, 2), f"stormtorch-relay ended with {relay.returncode}: {relay.stderr}"
        run(sys.executable, "-c", "import stormtorch_lab._engine")
        run(str(scripts / "stormtorch"), "theory", "--loss", "0.1")
    else:
        demo = subprocess.run([scripts / "stormtorch", "demo"], capture_output=True, text=True, check=False, timeout=60)
        assert demo.returncode == 2 and "pip install stormtorch-lab" in demo.stderr, demo.stderr

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TRAINING)
        os.environ["STORM_KEY"] = key
        os.environ["OMP_NUM_THREADS"] = "1"
        output = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    found = re.findall(r"rank (\d) of 2: 20 steps, digest (\S+)", output)
    assert sorted(rank for rank, _ in found) == ["0", "1"], output
    assert len({digest for _, digest in found}) == 1, f"exact parameters differ: {output}"
    print(f"{version}, {Path(place).name}: two ranks trained 20 steps with a key, and agree on every parameter")


if __name__ == "__main__":
    main()
