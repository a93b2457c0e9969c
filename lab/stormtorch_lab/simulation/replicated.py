"""Virtual workers under a `RankPolicy`: each has its own model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stormtorch.policies.rank_policy import RankPolicy
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch_lab.simulation.rank_rounds import RankRounds, Round
from stormtorch_lab.simulation.setting import MakeOptimizer, Setting
from stormtorch_lab.simulation.workers import Evaluate, Workers, judge_each

# Number of workers whose own models are evaluated if there is no common one.
_JUDGED = 4


class Replicated(Workers):
    """A simulated training under a `RankPolicy`.

    Args:
        setting: Setting of the simulation.
        policy: The user's policy.
        model: Model with which all workers begin; gets the parameters to evaluate.
        optimizer: Makes the optimizer of a worker.
    """

    def __init__(
        self,
        setting: Setting,
        policy: RankPolicy,
        model: nn.Module,
        optimizer: MakeOptimizer,
    ) -> None:
        self.setting, self.policy, self.model = setting, policy, model
        n, chunks, device = setting.workers, setting.chunks, setting.device
        self.first, self.last = setting.processes.part(n)
        self._trained = setting.shared(model)
        own = self.last - self.first
        self._models = chunks.empty(own, device=device)
        self._grads = chunks.empty(own, device=device)
        self._gradients = setting.gradients(model, own)
        self._personal = self._gradients.personal
        self._personal.make_optimizers(optimizer)
        for stacked, parameter in zip(chunks.views(self._models), self._trained, strict=True):
            stacked.copy_(parameter.detach().expand_as(stacked))
        self._own = [self._parameters(worker) for worker in range(own)]
        self._used_WP = torch.ones(own, len(self._trained), dtype=torch.bool)
        self._shared_optimizers = [optimizer(each) for each in self._own]
        self.optimizers = self._shared_optimizers + self._personal.optimizers
        initial_CE = chunks.empty(device=device)
        for values, parameter in zip(chunks.views(initial_CE), self._trained, strict=True):
            values.copy_(parameter.detach())
        self._rounds = RankRounds(setting, policy, initial_CE)
        self._under_way: Round | None = None
        self._samples = torch.Generator().manual_seed(setting.seed)
        self._steps = 0

    def _parameters(self, worker: int) -> list[nn.Parameter]:
        chunks = self.setting.chunks
        found = []
        for values, grad in zip(chunks.views(self._models[worker]), chunks.views(self._grads[worker]), strict=True):
            parameter = nn.Parameter(values)
            parameter.data = values  # shares the memory, whatever Parameter's constructor does
            parameter.grad = grad
            found.append(parameter)
        return found

    @torch.no_grad()
    def step(self, number: int, batches: Callable[[int, int], Any]) -> tuple[torch.Tensor, LedgerRow | None]:
        """Makes one step of all workers; see `Workers.step`."""
        policy, rounds = self.policy, self._rounds
        losses = self._compute(batches)
        gradients = policy.sends == "gradients"
        ended: LedgerRow | None = None
        if gradients:
            ended = LedgerRow(number)
            rounds.end(policy, self._grads, rounds.begin(policy, self._grads, ended, number))
        self._clip()
        works_W = self.setting.works_at(number)
        here_W = works_W[self.first : self.last]
        for optimizer, works in zip(self._shared_optimizers, here_W.tolist(), strict=True):
            if works:
                optimizer.step()
        self._personal.step(here_W, self.setting.clip)
        self._steps += 1
        rounds.stepped(works_W)
        if not gradients:
            ended = self._exchange(number)
        if ended is not None:
            ended.pair_drift = self._sampled_drift()
        return losses, ended

    def _exchange(self, number: int) -> LedgerRow | None:
        """Ends an exchange that is due, and begins the next. Returns the row of an ended one."""
        policy, rounds = self.policy, self._rounds
        ended: LedgerRow | None = None
        if self._under_way is None and self._steps >= policy.begins_at(rounds.number):
            self._under_way = rounds.begin(policy, self._models, LedgerRow(number), self._steps + policy.delay)
        if self._under_way is not None and self._steps >= self._under_way.ends:
            rounds.end(policy, self._models, self._under_way)
            ended, self._under_way = self._under_way.row, None
        return ended

    def _compute(self, batches: Callable[[int, int], Any]) -> torch.Tensor:
        losses = []
        used_WP = torch.empty_like(self._used_WP)
        for first in range(self.first, self.last, self._gradients.at_once):
            last = min(first + self._gradients.at_once, self.last)
            here = slice(first - self.first, last - self.first)
            self._gradients.replicas[: last - first].copy_(self._models[here])
            with torch.enable_grad():
                losses.append(self._gradients.compute(batches(first, last), first - self.first, last - first))
            self._grads[here].copy_(self._gradients.grads[: last - first])
            used_WP[here] = self._gradients.used[: last - first]
        self._show_gradients(used_WP)
        return self.setting.processes.all_reduce(torch.cat(losses).sum()) / self.setting.workers

    def _show_gradients(self, used_WP: torch.Tensor) -> None:
        """Removes the gradients of parameters that a worker has not used, so that its optimizer skips them."""
        for worker, index in (used_WP != self._used_WP).nonzero().tolist():
            grad = self.setting.chunks.views(self._grads[worker])[index]
            self._own[worker][index].grad = grad if used_WP[worker, index] else None
        self._used_WP = used_WP

    def _clip(self) -> None:
        """Clips the gradients of each worker by its own norm."""
        if self.setting.clip is not None:
            norm_W = torch.linalg.vector_norm(self._grads, dim=(1, 2))
            self._grads.mul_((self.setting.clip / (norm_W + 1e-6)).clamp(max=1.0).view(-1, 1, 1))

    def _sampled_drift(self) -> float:
        n, device = self.setting.workers, self.setting.device
        chunk_S, element_S = self.setting.chunks.choose(self.policy.drift_samples, self._samples)
        values_WS = self._models[:, chunk_S.to(device), element_S.to(device)].double()
        if n < 2:
            return 0.0
        return float(2 * self.setting.processes.everyone(values_WS, n).var(0).mean())

    # --- for the run --------------------------------------------------------------------------------------------------

    def judge(self, evaluate: Evaluate) -> tuple[float, float]:
        """Evaluates the mean of all models, with the personal parts of each worker.

        If models diverge by design, returns the mean result of a few of them, or of all if they have personal parts.
        """
        setting = self.setting
        self._gradients.average_buffers_into(self.model, setting.processes)
        common = self.policy.sends == "parameters"
        if common:
            self._load_parameters(setting.processes.all_reduce(self._models.sum(0)) / setting.workers)
        if common and not setting.personal:
            return evaluate(self.model)
        # The same models for any number of processes.
        judged = setting.workers if setting.personal else min(_JUDGED, setting.workers)
        return judge_each(setting, self._judge_own, evaluate, judged)

    def _judge_own(self, worker: int, evaluate: Evaluate) -> tuple[float, float]:
        if self.policy.sends != "parameters":
            self._load_parameters(self._models[worker - self.first])
        if not self.setting.personal:
            return evaluate(self.model)
        self._gradients.give_personal_to(self.model, worker - self.first)
        return evaluate(self.model, worker)

    def _load_parameters(self, values_CE: torch.Tensor) -> None:
        for parameter, values in zip(self._trained, self.setting.chunks.views(values_CE), strict=True):
            parameter.data.copy_(values)

    @torch.no_grad()
    def drift(self) -> float:
        """Returns the mean squared difference per parameter between two models, over all pairs of workers."""
        n, processes = self.setting.workers, self.setting.processes
        if n < 2:
            return 0.0
        mean_CE = processes.all_reduce(self._models.sum(0)) / n
        square = sum(float((own - mean_CE).double().square().sum()) for own in self._models)
        total = processes.all_reduce(torch.tensor(square, dtype=torch.float64))
        return 2 * float(total) / (n - 1) / self.setting.elements

    @property
    def how(self) -> str:
        """How gradients are computed: "batched" or "loop"."""
        return self._gradients.how

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a later process needs to continue."""
        return {
            "models": self._models,
            "optimizers": [each.state_dict() for each in self._shared_optimizers],
            "personal": self._personal.state_dict(),
            "rounds": self._rounds.state_dict(),
            "under_way": None if self._under_way is None else vars(self._under_way),
            "buffers": self._gradients.buffers,
            "samples": self._samples.get_state(),
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state dict."""
        self._models.copy_(state["models"])
        for own, saved in zip(self._shared_optimizers, state["optimizers"], strict=True):
            own.load_state_dict(saved)
        self._personal.load_state_dict(state["personal"])
        self._rounds.load_state_dict(state["rounds"])
        self._under_way = None if state["under_way"] is None else self._moved(Round(**state["under_way"]))
        self._gradients.load_buffers(state["buffers"])
        self._samples.set_state(state["samples"])
        self._steps = state["steps"]

    def _moved(self, round_: Round) -> Round:
        """Moves the state of an exchange from a checkpoint to this simulation's device."""
        device = self.setting.device
        return replace(round_, down_WC=round_.down_WC.to(device), results=round_.results.to(device))
