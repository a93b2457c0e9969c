"""Barrier: no rank continues before all ranks have arrived."""

from stormtorch.collectives.base.group import Group, Pending, Steps
from stormtorch.exchange.exchange import Plan, Receive, Send


def barrier(group: Group, *, timeout_s: float | None = None) -> Pending:
    """Starts an exchange of empty messages, which ends when all ranks of the group have called this."""
    return group.start(_steps(group, group.reserve(), timeout_s))


def _steps(group: Group, name: tuple[int, int], timeout_s: float | None) -> Steps:
    if group.size == 1:
        return
    ranks, others = group.ranks, group.others()
    yield Plan(
        "barrier",
        *name,
        [Send(ranks[peer], 0, 0) for peer in others],
        [Receive(ranks[peer], 0, 0) for peer in others],
        timeout_s=timeout_s,
    )
