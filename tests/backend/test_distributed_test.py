"""A part of PyTorch's own tests of torch.distributed on the backend storm; run_distributed_test.py runs all of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

RUNNER = str(Path(__file__).parents[1] / "helpers" / "run_distributed_test.py")
PART = (
    "test_accumulate_gradients_no_sync_grad,test_all_gather_into_tensor,test_all_reduce_coalesced_full,test_all_reduce_sum,"
    "test_barrier_timeout_global,test_ddp_comm_hook_logging,test_DistributedDataParallelCPU,test_gather_full,"
    "test_isend_torch_profiler,test_monitored_barrier_gloo,test_new_subgroups,test_scatter_object_list,test_send_recv_any_source,test_sparse_all_reduce"
)


KEPT_FOR_MPI = "test_all_to_all_complex,test_all_to_all_single_unequal_split_group"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world", "loss", "gates", "only", "number"),
    [
        (2, 0.0, "gloo", PART, 15),
        pytest.param(4, 0.05, "gloo", PART, 15, marks=pytest.mark.slow),
        (4, 0.0, "mpi", KEPT_FOR_MPI, 2),
    ],
)
def test_a_part_of_pytorchs_own_tests_pass(
    tmp_path: Path, world: int, loss: float, gates: str, only: str, number: int
) -> None:
    path = tmp_path / "out.json"
    words = ["--world", str(world), "--loss", str(loss), "--gates", gates, "--only", only, "--json", str(path)]
    done = subprocess.run([sys.executable, RUNNER, *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert len(json.loads(path.read_text())["passed"]) >= number
