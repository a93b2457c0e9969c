"""Ray: one actor per rank, which Ray starts again when it dies, on another machine if need be.

Run it with `python examples/launch/ray_actors.py`. Ray Train restarts all workers when one dies; Ray restarts plain
actors one by one, and they come into the running job by the same call.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import ray
from torch.distributed import TCPStore

SCRIPT = Path(__file__).parents[1] / "elastic.py"


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Rank:
    """One rank. Ray calls `train` again in the new process if the old one dies."""

    def train(self, store: str, rank: int, world: int, steps: int) -> str:
        """Trains to the end, and returns what the rank printed."""
        # In a process of its own: the training needs a main thread for SIGTERM, and Ray's worker must stay responsive.
        command = [sys.executable, str(SCRIPT), "--store", store, "--rank", str(rank), "--world", str(world)]
        done = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"rank {rank} ended with {done.returncode}: {done.stderr}")  # Ray restarts the actor
        return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One actor of Ray per rank.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.ranks, include_dashboard=False)
    # The store lives in the driver, which outlives the actors; in a cluster, give it the driver's address.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Rank.remote() for _ in range(arguments.ranks)]
    where = f"tcp://127.0.0.1:{store.port}"
    ends = [actor.train.remote(where, rank, arguments.ranks, arguments.steps) for rank, actor in enumerate(ranks)]
    print("".join(ray.get(ends)))
