"""Virtual workers under a `RankPolicy`: each has a model and an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormtorch.policies import rules
from stormtorch.policies.ledger import Row, links_of
from stormtorch.policies.policy import RankPolicy, applied, overrides
from stormtorch.simulation.exchanges import Exchanges
from stormtorch.simulation.links import LinkLosses
from stormtorch.simulation.setting import MakeOptimizer, Setting
from stormtorch.simulation.workers import Workers

# Number of workers whose own models are judged where there is no common one.
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
        self._trained = [each for each in model.parameters() if each.requires_grad]
        own = self.last - self.first
        self._models = chunks.empty(own, device=device)
        self._grads = chunks.empty(own, device=device)
        self._gradients = setting.gradients(model, own)
        for stacked, parameter in zip(chunks.views(self._models), self._trained, strict=True):
            stacked.copy_(parameter.detach().expand_as(stacked))
        self._own = [self._parameters(worker) for worker in range(own)]
        self._used_WP = torch.ones(own, len(self._trained), dtype=torch.bool)
        self.optimizers = [optimizer(each) for each in self._own]
        self._exchanges = Exchanges(setting, policy)
        self._order = torch.Generator().manual_seed(policy.seed)
        self._link_losses = LinkLosses(n if policy.weighs else 0, device)
        self._memory: dict[str, torch.Tensor] = {}
        """Memory of the owners, for the policy's `update`."""
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
    def step(self, number: int, batches: Callable[[int, int], Any]) -> tuple[torch.Tensor, Row | None]:
        """Makes one step of all workers; see `Workers.step`."""
        row = Row(number)
        losses = self._compute(batches)
        gradients = self.policy.sends == "gradients"
        if gradients:
            self._exchange(self._grads, row)
        self._clip()
        for optimizer in self.optimizers:
            optimizer.step()
        self._steps += 1
        if not gradients:
            if self._steps % self.policy.every:
                return losses, None
            self._exchange(self._models, row)
        row.pair_drift = self._sampled_drift()
        return losses, row

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
        return self.setting.processes.add_up(torch.cat(losses).sum()) / self.setting.workers

    def _show_gradients(self, used_WP: torch.Tensor) -> None:
        """Removes the gradients of parameters that a worker has not used, so that its optimizer leaves them alone."""
        for worker, place in (used_WP != self._used_WP).nonzero().tolist():
            grad = self.setting.chunks.views(self._grads[worker])[place]
            self._own[worker][place].grad = grad if used_WP[worker, place] else None
        self._used_WP = used_WP

    def _clip(self) -> None:
        """Clips what each worker applies by its own norm, as a worker knows no other."""
        if self.setting.clip is not None:
            norm_W = torch.linalg.vector_norm(self._grads, dim=(1, 2))
            self._grads.mul_((self.setting.clip / (norm_W + 1e-6)).clamp(max=1.0).view(-1, 1, 1))

    def _exchange(self, vectors_WCE: torch.Tensor, row: Row) -> None:
        """Sends vectors to the owners of their chunks, and the owners' results back to all workers."""
        setting, policy, n = self.setting, self.policy, self.setting.workers
        owner_C = torch.tensor(policy.order(n, self._order))[setting.chunks.owner_C]
        changed_W = self._exchanges.changed(policy, up=True)
        if changed_W is not None and policy.weighs:
            self._link_losses.translate(changed_W)
        up_WC = self._exchanges.draw(policy, row, up=True, owner_C=owner_C)
        down_WC = self._exchanges.draw(policy, row, up=False, owner_C=owner_C)
        self._exchanges.end_step()
        loss_WC: torch.Tensor | None = None
        if policy.weighs:
            owner_dev_C = owner_C.to(setting.device)
            loss_WC = self._link_losses.next(~up_WC, owner_dev_C, torch.bincount(owner_dev_C, minlength=n))
        # Worker by worker: a copy of all models at once would need as much memory as the models.
        sums_CE = torch.zeros_like(vectors_WCE[0])
        for worker, (own_CE, came_C) in enumerate(zip(vectors_WCE, up_WC[self.first : self.last], strict=True)):
            sent_CE = (
                own_CE if loss_WC is None else applied(policy.send, own_CE, loss_WC[self.first + worker].unsqueeze(-1))
            )
            rounded_CE = setting.rounded(sent_CE, step=row.step, sender=self.first + worker)
            sums_CE.add_(rounded_CE.masked_fill(~came_C.unsqueeze(-1), 0.0))
        setting.processes.add_up(sums_CE)
        count_C = up_WC.sum(0)
        combined_CE = applied(policy.combine, rules.mean_of_arrived(sums_CE, count_C), count_C.unsqueeze(-1), n)
        result_CE = setting.rounded(applied(policy.update, self._memory, combined_CE), step=row.step, sender=n)
        accepts = overrides(policy, "accept")
        keeps = policy.sends == "parameters" and setting.wire in (torch.bfloat16, torch.float16)
        for own_CE, came_C in zip(vectors_WCE, down_WC[self.first : self.last], strict=True):
            # A policy of its own gets a copy, in which what was lost is no number: using it shows at once.
            came_CE = result_CE.masked_fill(~came_C.unsqueeze(-1), torch.nan) if accepts else result_CE
            if keeps:  # what rounding took of this worker's own: a model that loses it each time would never move
                came_CE = came_CE + (own_CE - own_CE.to(setting.wire))
            own_CE.copy_(applied(policy.accept, own_CE, came_CE, came_C.unsqueeze(-1)))
        # Fractions of what travels: a worker's own chunks do not.
        others_W = (setting.chunks.count - torch.bincount(owner_C, minlength=n)).clamp(min=1)
        row.gradients, row.broadcast = (
            links_of(range(n), (1.0 - (~mask_WC).sum(1).cpu().double() / others_W).tolist())
            for mask_WC in (up_WC, down_WC)
        )
        row.effective_batch = float(count_C.double().mean()) / n
        row.variance_inflation = float(count_C.double().reciprocal().mean()) * n

    def _sampled_drift(self) -> float:
        n, device = self.setting.workers, self.setting.device
        chunk_S, element_S = self.setting.chunks.choose(self.policy.drift_samples, self._samples)
        values_WS = self._models[:, chunk_S.to(device), element_S.to(device)].double()
        if n < 2:
            return 0.0
        return float(2 * self.setting.processes.everyone(values_WS, n).var(0).mean())

    # --- for the run --------------------------------------------------------------------------------------------------

    def judge(self, evaluate: Callable[[nn.Module], tuple[float, float]]) -> tuple[float, float]:
        """Judges the mean of all models; where models drift apart, returns the mean judgement of a few."""
        self._gradients.average_buffers_into(self.model, self.setting.processes)
        if self.policy.sends == "parameters":
            mean_CE = self.setting.processes.add_up(self._models.sum(0)) / self.setting.workers
            return self._judge(mean_CE, evaluate)
        # The same few models, however many processes there are.
        judged = min(_JUDGED, self.setting.workers)
        sums = torch.zeros(2, dtype=torch.float64)
        for worker in range(self.first, min(self.last, judged)):
            sums += torch.tensor(self._judge(self._models[worker - self.first], evaluate), dtype=torch.float64)
        loss, right = (self.setting.processes.add_up(sums) / judged).tolist()
        return loss, right

    def _judge(
        self, values_CE: torch.Tensor, evaluate: Callable[[nn.Module], tuple[float, float]]
    ) -> tuple[float, float]:
        for parameter, values in zip(self._trained, self.setting.chunks.views(values_CE), strict=True):
            parameter.data.copy_(values)
        return evaluate(self.model)

    @torch.no_grad()
    def drift(self) -> float:
        """Returns the mean squared difference per parameter between two models, over all pairs of workers."""
        n, processes = self.setting.workers, self.setting.processes
        if n < 2:
            return 0.0
        mean_CE = processes.add_up(self._models.sum(0)) / n
        square = sum(float((own - mean_CE).double().square().sum()) for own in self._models)
        total = processes.add_up(torch.tensor(square, dtype=torch.float64))
        return 2 * float(total) / (n - 1) / self.setting.elements

    @property
    def how(self) -> str:
        """How gradients are computed: "batched" or "loop"."""
        return self._gradients.how

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a later process needs to continue."""
        return {
            "models": self._models,
            "optimizers": [each.state_dict() for each in self.optimizers],
            "masks": self._exchanges.state_dict(),
            "buffers": self._gradients.buffers,
            "order": self._order.get_state(),
            "samples": self._samples.get_state(),
            "steps": self._steps,
            "links": self._link_losses.state_dict(),
            "memory": self._memory,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state dict."""
        self._models.copy_(state["models"])
        for own, saved in zip(self.optimizers, state["optimizers"], strict=True):
            own.load_state_dict(saved)
        self._exchanges.load_state_dict(state["masks"])
        self._gradients.load_buffers(state["buffers"])
        self._order.set_state(state["order"])
        self._samples.set_state(state["samples"])
        self._steps = state["steps"]
        self._link_losses.load_state_dict(state["links"])
        self._memory = {name: each.to(self.setting.device) for name, each in state["memory"].items()}
