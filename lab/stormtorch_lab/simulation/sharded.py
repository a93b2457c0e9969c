"""Virtual workers under an `OwnerPolicy`: owners combine received gradients, step, and broadcast parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stormtorch.checks import BadSetting
from stormtorch.network.loss import SlowBackward
from stormtorch.policies import rules
from stormtorch.policies.convergence_guard import ConvergenceGuard, LossMeter
from stormtorch.policies.memory import MemoryStore
from stormtorch.policies.policy import OwnerPolicy, applied, overrides, takes
from stormtorch.telemetry.ledger import LedgerRow, pack_links
from stormtorch_lab.simulation.exchanges import Exchanges
from stormtorch_lab.simulation.links import LinkLosses
from stormtorch_lab.simulation.parameters.replicas import MOST_VERSIONS, Copies, Replicas
from stormtorch_lab.simulation.setting import MakeOptimizer, Setting
from stormtorch_lab.simulation.workers import Evaluate, Workers, judge_each


class Sharded(Workers):
    """A simulated training under an `OwnerPolicy`.

    Args:
        setting: Setting of the simulation.
        policy: The user's policy.
        model: Model whose parameters become the owners' exact ones.
        optimizer: Makes one optimizer for all owners: each updates only its shard, so together they hold one state.
    """

    def __init__(self, setting: Setting, policy: OwnerPolicy, model: nn.Module, optimizer: MakeOptimizer) -> None:
        # A deadline policy without a deadline runs without one if no worker is slow.
        wanted = policy.deadline is not None and policy.deadline != type(policy).deadline
        if wanted and not isinstance(setting.network, SlowBackward):
            raise BadSetting("deadline", "must be None in a simulation whose network is not a SlowBackward")
        self.setting, self.policy, self.model = setting, policy, model
        n, chunks, device = setting.workers, setting.chunks, setting.device
        self.first, self.last = setting.processes.part(n)
        self._trained = setting.shared(model)
        # With the default `accept`, the age of a copy identifies its value; otherwise every copy is stored.
        self._replicas: Replicas = (
            Copies(chunks, self.first, self.last, device, policy.accept)
            if overrides(policy, "accept")
            else Replicas(chunks, self.first, self.last, device)
        )
        for own, parameter in zip(chunks.views(self._replicas.owned), self._trained, strict=True):
            own.copy_(parameter.detach())
        self._bind()
        self._replicas.begin()
        self.optimizers = [optimizer(self._trained)]
        self._gradients = setting.gradients(model, self.last - self.first)
        self._personal = self._gradients.personal
        self._personal.make_optimizers(optimizer)
        self.optimizers += self._personal.optimizers
        self._grads = chunks.empty(device=device)
        self._memory = MemoryStore(self._grads.numel(), device)
        """Memory of the owners, for the policy's `combine`."""
        self._used_P = torch.zeros(len(self._trained), dtype=torch.bool)
        self._exchanges = Exchanges(setting, policy)
        self._owner_C = chunks.owner_C.to(device)
        self._chunks_of_W = torch.bincount(chunks.owner_C, minlength=n).to(device)
        # Of a small model, some workers own nothing, so they have no broadcast.
        self._owners = sorted(set(chunks.owner_C.tolist()))
        # Chunks sent per step: those of a worker's shard to all others, and those of all other shards to it.
        self._sent_W = [int(owned) * (n - 1) for owned in self._chunks_of_W]
        self._others_W = [len(chunks.owner_C) - int(owned) for owned in self._chunks_of_W]
        self._losses = [LossMeter(0.0) for _ in range(n)]
        self._link_losses = LinkLosses(n if policy.weighs else 0, device)
        self._guards = [ConvergenceGuard(policy.guard, policy.max_lag) for _ in range(n)]
        self._guarded = False
        self._tried: torch.Tensor | None = None
        self._oldest = 0
        self._samples = torch.Generator().manual_seed(setting.seed)

    def _bind(self) -> None:
        for own, parameter in zip(self.setting.chunks.views(self._replicas.owned), self._trained, strict=True):
            parameter.data = own

    def _show_gradients(self) -> None:
        """Gives the optimizer the gradients of stage 1; parameters that no worker has used have none."""
        grads = self.setting.chunks.views(self._grads)
        for grad, parameter, used in zip(grads, self._trained, self._used_P.tolist(), strict=True):
            parameter.grad = grad if used else None

    @torch.no_grad()
    def step(self, number: int, batches: Callable[[int, int], Any]) -> tuple[torch.Tensor, LedgerRow]:
        """Makes one step of all workers; see `Workers.step`."""
        row = LedgerRow(number)
        losses = self._stage_one(batches, row)
        chunk_S, element_S = self._choose()
        before_S = self._replicas.owned[chunk_S, element_S]
        self._stage_two(row)
        self._measure(row, chunk_S, element_S, before_S)
        self._exchanges.end_step()
        return losses, row

    # --- stage 1 ------------------------------------------------------------------------------------------------------

    def _stage_one(self, batches: Callable[[int, int], Any], row: LedgerRow) -> torch.Tensor:
        setting, policy, n = self.setting, self.policy, self.setting.workers
        changed_W = self._exchanges.changed(policy, up=True)
        if changed_W is not None and policy.weighs:
            self._link_losses.translate(changed_W)
        arrived_WC = self._exchanges.draw(policy, row, up=True)
        lost_WC = ~arrived_WC
        loss_WC = self._link_losses.next(lost_WC, self._owner_C, self._chunks_of_W) if policy.weighs else None
        self._grads.zero_()
        self._used_P.zero_()
        losses = []
        for first in range(self.first, self.last, self._gradients.at_once):
            last = min(first + self._gradients.at_once, self.last)
            self._replicas.put(first - self.first, last - self.first, self._gradients.replicas[: last - first])
            with torch.enable_grad():
                losses.append(self._gradients.compute(batches(first, last), first - self.first, last - first))
            self._used_P |= self._gradients.used[: last - first].any(0)
            grads_WCE = self._gradients.grads[: last - first]
            setting.round_(grads_WCE, step=row.step, sender=first)
            if loss_WC is not None:
                grads_WCE = applied(policy.send, grads_WCE, loss_WC[first:last].unsqueeze(-1))
            # Filled, not multiplied by zero: a lost gradient may be infinite.
            grads_WCE.masked_fill_(lost_WC[first:last].unsqueeze(-1), 0.0)
            self._grads.add_(grads_WCE.sum(0))
        setting.processes.all_reduce(self._grads)
        self._used_P = setting.processes.all_reduce(self._used_P.float()) > 0
        count_C = arrived_WC.sum(0)
        owner = [self._memory.chunks(0, *self._grads.shape)] if takes(policy.combine, "owner") else []
        mean_CE = rules.mean_of_arrived(self._grads, count_C)
        combined_CE = applied(policy.combine, mean_CE, count_C.unsqueeze(-1), n, *owner)
        if combined_CE is not self._grads:
            self._grads.copy_(combined_CE)
        self._arrived_up, self._count_C = arrived_WC, count_C
        if setting.clip is not None:
            norm = torch.linalg.vector_norm(self._grads)
            self._grads.mul_((setting.clip / (norm + 1e-6)).clamp(max=1.0))
        self._personal.step(torch.ones(self.last - self.first), setting.clip)
        return setting.processes.all_reduce(torch.cat(losses).sum()) / n

    # --- the step, and stage 2 ----------------------------------------------------------------------------------------

    def _stage_two(self, row: LedgerRow) -> None:
        policy, replicas = self.policy, self._replicas
        if replicas.reserve_versions(self._oldest):
            self._bind()
        self._show_gradients()
        exact = self._guarded or policy.down.exact
        for meter, (factor, most) in zip(self._losses, self._exchanges.changed(policy, up=False) or (), strict=False):
            meter.translate(factor, most)
        leads = [0.0 if exact else policy.ahead(each.value) for each in self._losses]
        next_version_CE = replicas.next_version()
        next_version_CE.copy_(replicas.owned)
        self.optimizers[0].step()
        if any(leads) or overrides(policy, "publish"):
            lead_C = torch.tensor(leads, device=next_version_CE.device)[self._owner_C]
            published_CE = applied(policy.publish, next_version_CE, replicas.owned, lead_C.unsqueeze(-1))
            if published_CE is not next_version_CE:
                next_version_CE.copy_(published_CE)
        else:
            next_version_CE.copy_(replicas.owned)
        self.setting.round_(next_version_CE, step=row.step, sender=self.setting.workers)
        arrived_WC = self._exchanges.draw(policy, row, up=False, exact=self._guarded)
        self._tried = None
        if self._guarded:
            # Its loss without repair is that of the gradients, or of a separate first pass if gradients are repaired.
            self._tried = self._arrived_up if policy.up.budget == 1.0 else self._exchanges.first_pass_down(policy)
        # Without the chunks that are fetched below: they do not measure the network.
        self._arrived_down = arrived_WC
        own_WC = arrived_WC[self.first : self.last]
        most = min(policy.max_lag or MOST_VERSIONS, MOST_VERSIONS)
        if self._oldest >= most:
            # Fetched even if the broadcast arrives: workers send the request before.
            overdue_WC = rules.overdue(replicas.ages, most)
            row.fetched = int(self.setting.processes.all_reduce(overdue_WC.sum()))
            own_WC = own_WC | overdue_WC
        replicas.broadcast(own_WC)
        row.lead = sum(leads[owner] for owner in self._owners) / len(self._owners)
        row.guarded = self._guarded

    # --- what is measured ---------------------------------------------------------------------------------------------

    def _choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws the elements by which replicas are compared, at every step."""
        chunk_S, element_S = self.setting.chunks.choose(self.policy.drift_samples, self._samples)
        return chunk_S.to(self._owner_C.device), element_S.to(self._owner_C.device)

    def _measure(self, row: LedgerRow, chunk_S: torch.Tensor, element_S: torch.Tensor, before_S: torch.Tensor) -> None:
        n, processes, replicas = self.setting.workers, self.setting.processes, self._replicas
        others_W = (len(self._owner_C) - self._chunks_of_W).clamp(min=1)
        down_WC, up_WC = self._arrived_down, self._arrived_up
        values_WS, own_WS = replicas.sample(chunk_S, element_S)
        owned_S = replicas.owned[chunk_S, element_S]
        away_WS = (values_WS - owned_S).masked_fill_(own_WS, 0.0).double()
        sums = processes.all_reduce(torch.stack([away_WS.sum(0), away_WS.square().sum(0)]))
        lags = torch.bincount(replicas.ages[~replicas.own].flatten(), minlength=replicas.versions).double()
        processes.all_reduce(lags)
        oldest_W = processes.everyone(replicas.ages.amax(1).double(), n)
        # One copy from the device for all values.
        parts = [
            self._lost_by_owner(down_WC),
            (~down_WC).sum(1).double() / others_W if self._tried is None else self._lost_by_owner(self._tried),
            (~up_WC).sum(1).double() / others_W,
            oldest_W,
            lags,
            sums.flatten(),
            (owned_S - before_S).double().square().mean().view(1),
            torch.stack([self._count_C.double().mean(), self._count_C.double().reciprocal().mean()]),
        ]
        of_owner, watched, sent_up, oldest, lag, spread, variance, counts = (
            part.tolist() for part in torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])
        )
        self._learn(row, of_owner, watched, sent_up, oldest)
        row.lag = {age: int(count) for age, count in enumerate(lag) if count}
        m = max(n - 1, 1)
        half = len(spread) // 2
        row.owner_drift = sum(spread[half:]) / m / half if half else None
        if half and m > 1:
            pairs = [
                2 * (square - total * total / m) / (m - 1)
                for total, square in zip(spread[:half], spread[half:], strict=True)
            ]
            row.pair_drift = sum(pairs) / half
        row.update_variance = variance[0] if half else None
        row.effective_batch = counts[0] / n
        row.variance_inflation = n * counts[1]

    def _lost_by_owner(self, arrived_WC: torch.Tensor) -> torch.Tensor:
        """Returns the fraction (N) of each owner's chunks that was lost from it, or to it."""
        n = self.setting.workers
        lost_C = n - arrived_WC.sum(0)
        lost_N = torch.zeros(n, dtype=torch.float64, device=lost_C.device).index_add_(0, self._owner_C, lost_C.double())
        return lost_N / (self._chunks_of_W.clamp(min=1) * max(n - 1, 1))

    def _learn(
        self, row: LedgerRow, of_owner: list[float], watched: list[float], sent_up: list[float], oldest: list[float]
    ) -> None:
        sent_W, others_W = self._sent_W, self._others_W
        if self._guarded:
            self._first_pass(watched, sent_up)
        elif not self.policy.down.exact:
            for meter, lost, sent in zip(self._losses, of_owner, sent_W, strict=True):
                meter.add(lost * sent, sent)
        row.loss = sum(self._losses[owner].value for owner in self._owners) / len(self._owners)
        row.gradients = pack_links(range(len(sent_up)), [1.0 - lost for lost in sent_up])
        row.broadcast = pack_links(self._owners, [1.0 - of_owner[owner] for owner in self._owners])
        self._oldest = int(max(oldest))
        seen_W = sent_W if self._guarded else others_W
        for guard, lost, seen, age in zip(self._guards, watched, seen_W, oldest, strict=True):
            guard.watch(lost * seen, seen, int(age))
        guarded = any(guard.alarm for guard in self._guards)
        if guarded != self._guarded:
            row.events.append("guard: the broadcast is exact" if guarded else "guard: the broadcast may lose again")
        self._guarded = guarded

    def _first_pass(self, watched: list[float], sent_up: list[float]) -> None:
        """Counts the loss that a broadcast repaired by the guard would have had, as real ranks do."""
        lossy = self.policy.up.budget == 1.0
        most = self.policy.down.budget
        for owner_index, meter in enumerate(self._losses):
            lost = sent_up[owner_index] if lossy else watched[owner_index]
            sent = self._others_W[owner_index] if lossy else self._sent_W[owner_index]
            meter.add(min(lost, most) * sent, sent)

    # --- for the run --------------------------------------------------------------------------------------------------

    def judge(self, evaluate: Evaluate) -> tuple[float, float]:
        """Evaluates the owners' parameters, with the mean of all workers' buffers and the personal parts of each."""
        self._gradients.average_buffers_into(self.model, self.setting.processes)
        if self.setting.personal:
            return judge_each(self.setting, self._judge_own, evaluate, self.setting.workers)
        return evaluate(self.model)

    def _judge_own(self, worker: int, evaluate: Evaluate) -> tuple[float, float]:
        self._gradients.give_personal_to(self.model, worker - self.first)
        return evaluate(self.model, worker)

    @torch.no_grad()
    def drift(self) -> float:
        """Returns the mean squared difference per parameter between two replicas, over all pairs of workers."""
        n, replicas = self.setting.workers, self._replicas
        total = torch.zeros_like(replicas.owned)
        square = torch.zeros((), dtype=torch.float64, device=total.device)
        for first in range(self.first, self.last, self._gradients.at_once):
            count = min(self._gradients.at_once, self.last - first)
            away = self._gradients.replicas[:count]
            replicas.put(first - self.first, first - self.first + count, away)
            away -= replicas.owned
            total += away.sum(0)
            square += away.double().square().sum() if away.device.type == "cpu" else away.square().sum().double()
        processes = self.setting.processes
        processes.all_reduce(total)
        processes.all_reduce(square)
        spread = float(square) - float((total / n).double().square().sum()) * n
        return max(2 * spread / (n - 1) / self.setting.elements, 0.0) if n > 1 else 0.0

    @property
    def how(self) -> str:
        """How gradients are computed: "batched" or "loop"."""
        return self._gradients.how

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a later process needs to continue."""
        return {
            "replicas": self._replicas.state_dict(),
            "optimizer": self.optimizers[0].state_dict(),
            "masks": self._exchanges.state_dict(),
            "buffers": self._gradients.buffers,
            "personal": self._personal.state_dict(),
            "losses": [each.state for each in self._losses],
            "links": self._link_losses.state_dict(),
            "guards": [each.state for each in self._guards],
            "guarded": self._guarded,
            "oldest": self._oldest,
            "memory": self._memory.state_dict(),
            "samples": self._samples.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state dict."""
        self._replicas.load_state_dict(state["replicas"])
        self._bind()
        self.optimizers[0].load_state_dict(state["optimizer"])
        self._exchanges.load_state_dict(state["masks"])
        self._gradients.load_buffers(state["buffers"])
        self._personal.load_state_dict(state["personal"])
        for meter, saved in zip(self._losses, state["losses"], strict=True):
            meter.restore(*saved)
        for guard, saved in zip(self._guards, state["guards"], strict=True):
            guard.restore(*saved)
        self._link_losses.load_state_dict(state["links"])
        self._memory.load_state_dict(state["memory"])
        self._guarded, self._oldest = state["guarded"], state["oldest"]
        self._samples.set_state(state["samples"])
