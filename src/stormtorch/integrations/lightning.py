"""Integration with Lightning: `Trainer(strategy=StormStrategy())` trains by `prepare`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from stormtorch.exchange.options import Options
from stormtorch.policies.policy import Policy
from stormtorch.runtime.prepare import exact, prepare
from stormtorch.runtime.session.session import sessions_of


class StormStrategy(DDPStrategy):
    """Trains a LightningModule on the backend storm, with each optimizer prepared and no wrapper around the module.

    Lightning still starts the processes, partitions the data, accumulates and clips gradients, and saves and loads
    checkpoints on rank 0. Validation, tests and predictions run under `exact`, so that all ranks have the same
    parameters.

    Args:
        policy: How ranks train together; None is `BoundedDrift()`.
        options: Settings of the transport, such as a key or an interface; None takes the defaults.
        settings: Passed on to `DDPStrategy`, such as `start_method`, `timeout` or `cluster_environment`.
    """

    strategy_name = "storm"

    def __init__(self, policy: Policy | None = None, options: Options | None = None, **settings: Any) -> None:
        super().__init__(process_group_backend="storm", **settings)
        self.policy = policy
        self.options = options
        self._evaluating = contextlib.ExitStack()

    def setup_distributed(self) -> None:
        """Creates the process group with `options`, if given. Lightning uses a group that already exists."""
        if self.options is not None and not dist.is_initialized():
            where = self.cluster_environment
            self.set_world_ranks()
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = where.main_address, str(where.main_port)
            dist.init_process_group(
                "storm",
                rank=where.global_rank(),
                world_size=where.world_size(),
                timeout=self._timeout,
                pg_options=self.options,
            )
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Wraps nothing: `setup_optimizers` prepares the module instead."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the user's optimizers and prepares them, in the same order on all ranks."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            prepare(self.lightning_module, optimizer, policy=self.policy)
        # Lightning would clip the optimizer's parameters: this rank's shard, whose norm is not that of the gradient.
        self.precision_plugin.main_params = _parameters_of

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context in which backward only accumulates gradients."""
        with self.lightning_module.no_sync():
            yield

    def on_validation_start(self) -> None:
        """Begins `exact`: all ranks get the same parameters."""
        super().on_validation_start()
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        """Ends `exact`: each rank continues with its own replica."""
        self._evaluating.close()
        super().on_validation_end()

    def on_test_start(self) -> None:
        """Begins `exact`: all ranks get the same parameters."""
        super().on_test_start()
        self._begin_evaluation()

    def on_test_end(self) -> None:
        """Ends `exact`: each rank continues with its own replica."""
        self._evaluating.close()
        super().on_test_end()

    def on_predict_start(self) -> None:
        """Begins `exact`: all ranks get the same parameters."""
        super().on_predict_start()
        self._begin_evaluation()

    def on_predict_end(self) -> None:
        """Ends `exact`: each rank continues with its own replica."""
        self._evaluating.close()
        super().on_predict_end()

    def _begin_evaluation(self) -> None:
        self._evaluating.close()
        module: nn.Module = self.lightning_module
        if sessions_of(module):  # trainer.test() of a module that was never fitted has none
            self._evaluating.enter_context(exact(module))


def _parameters_of(optimizer: Any) -> Iterator[nn.Parameter]:
    return iter(optimizer.session.parameters)
