"""Exchanges of virtual workers under a `RankPolicy`: send, combine at the owners, accept at the workers.

W workers, C chunks, E elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stormtorch.policies import rules
from stormtorch.policies.memory import Memory, MemoryStore
from stormtorch.policies.policy import applied, overrides
from stormtorch.policies.rank_policy import RankPolicy, remembers, with_rank
from stormtorch.telemetry.ledger import LedgerRow, pack_links
from stormtorch_lab.simulation.exchanges import Exchanges
from stormtorch_lab.simulation.links import LinkLosses
from stormtorch_lab.simulation.setting import Setting


@dataclass
class Round:
    """An exchange in flight."""

    number: int
    row: LedgerRow
    ends: int
    """Number of optimizer steps after which workers accept the results."""
    down_WC: torch.Tensor
    """Whether each chunk arrives at each worker."""
    results: torch.Tensor
    """Values sent by owners, (C, E), or by partners, (W, C, E), if workers exchange in pairs."""
    takes_W: torch.Tensor
    """Whether each worker takes part."""
    steps_W: torch.Tensor
    """Optimizer steps of each worker since its last exchange of this fragment."""


class Fragment:
    """Chunks that are exchanged at a time.

    Args:
        setting: Setting of the simulation.
        policy: The user's policy.
        number: Number of the fragment; the last parameters belong to the first.
    """

    def __init__(self, setting: Setting, policy: RankPolicy, number: int) -> None:
        count, n = setting.chunks.count, setting.workers
        bounds = [count - local_index * count // policy.fragments for local_index in (number, number + 1)]
        self.chunks = slice(bounds[1], bounds[0])
        """Slice of its chunks in the model."""
        self.count = bounds[0] - bounds[1]
        if policy.fragments == 1:
            self.owner_C = setting.chunks.owner_C
        else:
            self.owner_C = torch.arange(self.count) * n // max(self.count, 1)
        if policy.exchanges_in_pairs:
            self.owner_C = torch.zeros_like(self.owner_C)
        self.exchanges = Exchanges(setting, policy, self.owner_C, seed=number)
        self.losses = LinkLosses(n if policy.weighs else 0, setting.device)
        self.since_W = torch.zeros(n, dtype=torch.int64)
        """Optimizer steps of each worker since its last exchange."""


class RankRounds:
    """All exchanges of one training.

    Args:
        setting: Setting of the simulation.
        policy: The user's policy.
        initial_CE: Parameters with which all workers begin.
    """

    def __init__(self, setting: Setting, policy: RankPolicy, initial_CE: torch.Tensor) -> None:
        self._setting = setting
        self.first, self.last = setting.processes.part(setting.workers)
        fragments = min(policy.fragments, setting.chunks.count)
        self._fragments = [Fragment(setting, policy, number) for number in range(fragments)]
        self._order = torch.Generator().manual_seed(policy.seed)
        self._owners = MemoryStore(initial_CE.numel(), setting.device)
        own = self.last - self.first if remembers(policy) else 0
        self._ranks = [MemoryStore(initial_CE.numel(), setting.device) for _ in range(own)]
        self.number = 0
        """Number of exchanges so far."""
        if overrides(policy, "meet"):
            n = setting.workers
            everyone = [MemoryStore(0).chunks(0, 0, 0).told(index=worker, ranks=n, round_=0) for worker in range(n)]
            told = [policy.meet(rank) for rank in everyone]
            for rank in everyone:
                policy.met(rank, told)
        for fragment in self._fragments:
            values_CE = initial_CE[fragment.chunks]
            policy.begin_owner(self._memory(self._owners, fragment), values_CE)
            for local_index, store in enumerate(self._ranks):
                policy.begin_rank(self._memory(store, fragment, self.first + local_index), values_CE)

    def _memory(self, store: MemoryStore, fragment: Fragment, index: int = 0, steps: int = 0) -> Memory:
        per_chunk = self._setting.chunks.per_chunk
        memory = store.chunks(fragment.chunks.start * per_chunk, fragment.count, per_chunk)
        return memory.told(index=index, ranks=self._setting.workers, round_=self.number, steps=steps)

    def _rank(self, fragment: Fragment, worker: int, steps_W: torch.Tensor) -> Memory:
        """Returns the memory of one of this process's workers; an empty one if the policy needs none."""
        store = self._ranks[worker - self.first] if self._ranks else MemoryStore(0)
        if not self._ranks:
            return store.chunks(0, 0, 0)
        return self._memory(store, fragment, worker, int(steps_W[worker]))

    def stepped(self, works_W: torch.Tensor) -> None:
        """Counts an optimizer step of the workers that made one."""
        for fragment in self._fragments:
            fragment.since_W += works_W

    # --- beginning ----------------------------------------------------------------------------------------------------

    def begin(self, policy: RankPolicy, vectors_WCE: torch.Tensor, row: LedgerRow, ends: int) -> Round:
        """Begins an exchange of the next fragment.

        Args:
            policy: Policy of the step.
            vectors_WCE: Parameters or gradients of this process's workers.
            row: Row of the exchange.
            ends: Number of optimizer steps after which workers accept the results.
        """
        fragment = self._fragments[self.number % len(self._fragments)]
        vectors_WCE = vectors_WCE[:, fragment.chunks]
        steps_W = fragment.since_W.clone()
        gradients = policy.sends == "gradients"
        takes_W = torch.ones_like(steps_W, dtype=torch.bool) if gradients else steps_W >= policy.at_least
        fragment.since_W[takes_W] = 0
        make = self._in_pairs if policy.exchanges_in_pairs else self._by_owners
        results, down_WC = make(policy, fragment, vectors_WCE, row, takes_W, steps_W)
        found = Round(self.number, row, ends, down_WC, results, takes_W, steps_W)
        fragment.exchanges.end_step()
        self.number += 1
        return found

    def _in_pairs(
        self,
        policy: RankPolicy,
        fragment: Fragment,
        vectors_WCE: torch.Tensor,
        row: LedgerRow,
        takes_W: torch.Tensor,
        steps_W: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        setting, n = self._setting, self._setting.workers
        partner_W = policy.partners(n, self._order)
        arrived_WC = fragment.exchanges.draw_pairs(policy, row, partner_W)
        arrived_WC &= takes_W[partner_W].to(arrived_WC.device).unsqueeze(-1)
        sent_WCE = torch.stack(
            [
                self._sent(policy, fragment, own_CE, 0.0, row, self.first + local_index, steps_W)
                for local_index, own_CE in enumerate(vectors_WCE)
            ]
        )
        if policy.reports:
            for local_index, sent_CE in enumerate(sent_WCE):
                rank = self._rank(fragment, self.first + local_index, steps_W)
                policy.sent(rank, sent_CE, arrived_WC[partner_W[self.first + local_index]].unsqueeze(-1))
        results_WCE = setting.processes.everyone(sent_WCE, n)[partner_W[self.first : self.last]]
        self._count(row, arrived_WC.new_ones(arrived_WC.shape), arrived_WC, fragment, meets=True)
        return results_WCE, arrived_WC

    def _by_owners(
        self,
        policy: RankPolicy,
        fragment: Fragment,
        vectors_WCE: torch.Tensor,
        row: LedgerRow,
        takes_W: torch.Tensor,
        steps_W: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        setting, n, exchanges = self._setting, self._setting.workers, fragment.exchanges
        owner_C = torch.tensor(policy.order(n, self._order))[fragment.owner_C]
        changed_W = exchanges.changed(policy, up=True)
        if changed_W is not None and policy.weighs:
            fragment.losses.translate(changed_W)
        up_WC = exchanges.draw(policy, row, up=True, owner_C=owner_C)
        down_WC = exchanges.draw(policy, row, up=False, owner_C=owner_C)
        owner_C = owner_C.to(setting.device)
        loss_WC: torch.Tensor | None = None
        if policy.weighs:
            loss_WC = fragment.losses.next(~up_WC, owner_C, torch.bincount(owner_C, minlength=n))
        self._count(row, up_WC, down_WC, fragment)
        weight_W = weights(policy, takes_W, steps_W).to(setting.device)
        plain = bool((weight_W == 1.0).all())
        # Worker by worker: a copy of all models at once would need as much memory as the models.
        sums_CE, owned_CE = torch.zeros_like(vectors_WCE[0]), torch.zeros_like(vectors_WCE[0])
        for worker, own_CE in enumerate(vectors_WCE, self.first):
            loss = 0.0 if loss_WC is None else loss_WC[worker].unsqueeze(-1)
            sent_CE = self._sent(policy, fragment, own_CE, loss, row, worker, steps_W)
            arrived_C1 = up_WC[worker].unsqueeze(-1)
            if policy.reports:
                policy.sent(self._rank(fragment, worker, steps_W), sent_CE, arrived_C1 & bool(takes_W[worker]))
            sums_CE.add_(sent_CE.masked_fill(~arrived_C1, 0.0), alpha=float(weight_W[worker]))
            if not plain:
                owned_CE.add_(sent_CE.masked_fill((owner_C != worker).unsqueeze(-1), 0.0))
        setting.processes.all_reduce(sums_CE)
        count_C = (up_WC & (weight_W > 0.0).unsqueeze(-1)).sum(0)
        if plain:
            mean_CE = rules.mean_of_arrived(sums_CE, count_C)
        else:
            setting.processes.all_reduce(owned_CE)
            mean_CE = rules.weighted_mean(sums_CE, weight_W @ up_WC.float(), owned_CE)
        combined_CE = applied(policy.combine, mean_CE, count_C.unsqueeze(-1), n)
        owner = self._memory(self._owners, fragment)

        def update(values: torch.Tensor) -> torch.Tensor:
            return policy.update(owner, values)

        update.__qualname__ = policy.update.__qualname__
        results_CE = applied(update, combined_CE)
        if policy.codes is not None:
            return policy.codes[1].rounded(results_CE), down_WC
        return setting.rounded(results_CE, step=row.step, sender=n), down_WC

    def _sent(
        self,
        policy: RankPolicy,
        fragment: Fragment,
        own_CE: torch.Tensor,
        loss: Any,
        row: LedgerRow,
        worker: int,
        steps_W: torch.Tensor,
    ) -> torch.Tensor:
        if overrides(policy, "send"):
            own_CE = applied(with_rank(policy.send, self._rank(fragment, worker, steps_W)), own_CE, loss)
        if policy.codes is not None:
            return policy.codes[0].rounded(own_CE)
        return self._setting.rounded(own_CE, step=row.step, sender=worker)

    def _count(
        self, row: LedgerRow, up_WC: torch.Tensor, down_WC: torch.Tensor, fragment: Fragment, *, meets: bool = False
    ) -> None:
        n = self._setting.workers
        # Fractions of the sent chunks: a worker's own chunks are not sent.
        own_W = torch.zeros(n, dtype=torch.int64) if meets else torch.bincount(fragment.owner_C, minlength=n)
        others_W = (fragment.count - own_W).clamp(min=1)
        row.gradients, row.broadcast = (
            pack_links(range(n), (1.0 - (~mask_WC).sum(1).cpu().double() / others_W).tolist())
            for mask_WC in (up_WC, down_WC)
        )
        count_C = up_WC.sum(0).double()
        row.effective_batch = float(count_C.mean()) / n
        row.variance_inflation = float(count_C.reciprocal().mean()) * n

    # --- ending -------------------------------------------------------------------------------------------------------

    def end(self, policy: RankPolicy, vectors_WCE: torch.Tensor, round_: Round) -> None:
        """Applies the received results of an exchange at the workers."""
        setting = self._setting
        fragment = self._fragments[round_.number % len(self._fragments)]
        accepts = overrides(policy, "accept")
        keeps = policy.sends == "parameters" and setting.wire in (torch.bfloat16, torch.float16)
        for worker, all_CE in enumerate(vectors_WCE, self.first):
            if not round_.takes_W[worker]:
                continue
            own_CE = all_CE[fragment.chunks]
            arrived_C1 = round_.down_WC[worker].unsqueeze(-1)
            received_CE = round_.results[worker - self.first] if policy.exchanges_in_pairs else round_.results
            if accepts:  # a user's `accept` gets a copy with NaN for lost values: wrong use fails visibly
                received_CE = received_CE.masked_fill(~arrived_C1, torch.nan)
            if keeps:  # keep this worker's rounding error: a model that loses it each time would never move
                received_CE = received_CE + (own_CE - own_CE.to(setting.wire))
            rank = self._rank(fragment, worker, round_.steps_W)
            rank.arrived = float(round_.down_WC[worker].float().mean())
            accept = with_rank(policy.accept, rank)
            own_CE.copy_(applied(accept, own_CE, received_CE, arrived_C1))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "number": self.number,
            "order": self._order.get_state(),
            "owners": self._owners.state_dict(),
            "ranks": [each.state_dict() for each in self._ranks],
            "masks": [each.exchanges.state_dict() for each in self._fragments],
            "links": [each.losses.state_dict() for each in self._fragments],
            "since": [each.since_W for each in self._fragments],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        self.number = state["number"]
        self._order.set_state(state["order"])
        self._owners.load_state_dict(state["owners"])
        for store, saved in zip(self._ranks, state["ranks"], strict=True):
            store.load_state_dict(saved)
        parts = zip(self._fragments, state["masks"], state["links"], state["since"], strict=True)
        for fragment, masks, links, since_W in parts:
            fragment.exchanges.load_state_dict(masks)
            fragment.losses.load_state_dict(links)
            fragment.since_W.copy_(since_W)


def weights(policy: RankPolicy, takes_W: torch.Tensor, steps_W: torch.Tensor) -> torch.Tensor:
    """Returns the weight of each worker in a mean: by its steps, or equal; 0 if it takes no part."""
    if not policy.by_steps or policy.sends == "gradients":
        return takes_W.float()
    most = max(int(steps_W.max()), 1)
    return steps_W.masked_fill(~takes_W, 0).float() / most
