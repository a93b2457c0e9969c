"""Programs that name no backend, on storm."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import stormtorch
from backend_job import free_ports
from stormtorch_lab.jobs.ranks import Member, run_ranks

ASK = "import torch.distributed as d; print(*(d.get_default_backend_for_device(each) for each in ('cpu', 'cuda')))"


@pytest.mark.thorough
@pytest.mark.pure
@pytest.mark.parametrize(
    ("value", "defaults"),
    [(None, "gloo nccl"), ("0", "gloo nccl"), ("1", "storm nccl"), ("cpu", "storm nccl"), ("cpu,cuda", "storm storm")],
)
def test_environment_variable_makes_storm_the_default_of_what_it_names(value: str | None, defaults: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "STORM_DEFAULT_BACKEND"}
    environment |= {} if value is None else {"STORM_DEFAULT_BACKEND": value}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == defaults


@pytest.mark.thorough
@pytest.mark.pure
def test_wrong_value_of_the_variable_is_a_warning_and_never_an_error_of_import_torch() -> None:
    environment = os.environ | {"STORM_DEFAULT_BACKEND": "yes"}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "gloo nccl"
    assert "STORM_DEFAULT_BACKEND must be" in done.stderr and "'yes'" in done.stderr


def without_a_name(member: Member, port: int, how: str) -> list[float]:
    torch.set_num_threads(1)
    stormtorch.use_as_default(cuda=True)  # both: where there is a GPU, torch asks for its default
    assert dist.get_default_backend_for_device("cpu") == "storm"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(member.rank), "WORLD_SIZE": str(member.world)}
    tensor = torch.ones(3)
    if how == "mesh":
        mesh = init_device_mesh("cpu", (member.world,), mesh_dim_names=("replicas",))
        group: Any = mesh.get_group("replicas")
    else:
        dist.init_process_group()
        group = dist.new_group()
    assert group.name() == "storm"
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["mesh", "init"])
def test_groups_that_name_no_backend_are_made_on_storm(how: str) -> None:
    assert run_ranks(without_a_name, 2, (free_ports(1)[0], how), timeout_s=60) == [[4.0] * 3] * 2
