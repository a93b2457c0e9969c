"""What the network costs a job, in seconds of a step and in steps of the training."""

from dataclasses import dataclass

from stormtorch import theory
from stormtorch.watch.job_snapshot import JobSnapshot

# Formulas of theory need less than everything to be lost.
_MOST_LOSS = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCost:
    """What the network costs, over the running ranks."""

    step_s: float = 0.0
    network_share: float = 0.0
    """Part of a step in which ranks wait for the network, without the waiting for a slow rank."""
    straggler_share: float = 0.0
    """Part of a step in which ranks wait for the rank that computes longest."""
    link_loss: float | None = None
    """Mean loss of all links, before any repair."""
    lost: float = 0.0
    """Fraction of the chunks that did not arrive in the end, after repair."""
    sent: float = 0.0
    """Bytes per second that one rank sends."""
    line: float | None = None
    """Bytes per second that rate control lets one rank send to all its peers together; None if unlimited."""
    effective_batch: float | None = None
    """Part of the batch that counts: fraction of the ranks whose gradients are in the mean."""
    more_steps: float | None = None
    """Part by which theory expects more steps for the same loss of the training, at the measured `lost`."""

    @property
    def line_share(self) -> float | None:
        """Achieved over ideal bandwidth."""
        return self.sent / self.line if self.line else None


def network_cost(job_snapshot: JobSnapshot) -> NetworkCost:
    """Returns what the network costs a job now, or has cost it if it is over."""
    live, breakdowns, step_totals = job_snapshot.live, job_snapshot.breakdowns, job_snapshot.step_totals
    losses = [link.loss for link in job_snapshot.links if link.loss is not None]
    link_loss = sum(losses) / len(losses) if losses else None
    if not breakdowns:
        return NetworkCost(link_loss=link_loss)
    steps_s = sum(breakdown.step_s for breakdown in breakdowns.values())
    lines = [
        sum(rates) for rank in step_totals if (rates := [link.rate for link in live[rank].links.values() if link.rate])
    ]
    batches = [value for rank in step_totals if (value := live[rank].latest.get("effective_batch")) is not None]
    steps = sum(totals.steps for totals in step_totals.values())
    lost = sum(totals.lost * totals.steps for totals in step_totals.values()) / steps
    seconds = sum(totals.seconds for totals in step_totals.values())
    return NetworkCost(
        step_s=steps_s / len(breakdowns),
        network_share=sum(breakdown.network_s for breakdown in breakdowns.values()) / steps_s if steps_s else 0.0,
        straggler_share=sum(breakdown.straggler_s for breakdown in breakdowns.values()) / steps_s if steps_s else 0.0,
        link_loss=link_loss,
        lost=lost,
        sent=sum(totals.bytes_sent for totals in step_totals.values()) / seconds if seconds else 0.0,
        line=sum(lines) / len(lines) if lines else None,
        effective_batch=sum(batches) / len(batches) if batches else None,
        more_steps=_more_steps(job_snapshot, lost),
    )


def _more_steps(job_snapshot: JobSnapshot, lost: float) -> float | None:
    """Theory's cost of what did not arrive, for the policy that the job names."""
    ranks = len(job_snapshot.breakdowns)
    if ranks < 2:
        return None
    process = next(iter(job_snapshot.live.values()))
    p, steps = min(max(lost, 0.0), _MOST_LOSS), 1000
    if process.policy == "ModelAveraging":
        return theory.averaging_steps(p, ranks, steps) / steps - 1.0
    if process.policy == "BoundedDrift" and not any(each.latest.get("lead") for each in job_snapshot.live.values()):
        max_lag = process.settings.get("max_lag", "")
        bounded = int(max_lag) if max_lag.isdecimal() and int(max_lag) > 0 else None
        return theory.plain_steps(p, ranks, steps, bounded) / steps - 1.0
    return theory.lead_steps(p, ranks, steps) / steps - 1.0
