"""What the network costs a job, in seconds of a step and in steps of the training."""

from dataclasses import dataclass

from stormtorch import theory
from stormtorch.watch.job_snapshot import JobSnapshot

# The formulas hold for losses below 1.
_MOST_LOSS = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCost:
    """Cost of the network, averaged over the running ranks."""

    step_s: float = 0.0
    network_share: float = 0.0
    """Fraction of a step in which ranks wait for the network; waiting for a slow rank is excluded."""
    straggler_share: float = 0.0
    """Fraction of a step in which ranks wait for the slowest rank."""
    link_loss: float | None = None
    """Mean loss of all links, before retransmission."""
    lost: float = 0.0
    """Fraction of the chunks that never arrived, after retransmission."""
    sent: float = 0.0
    """Bytes per second that a rank sends."""
    line: float | None = None
    """Bytes per second that rate control allows a rank to send to all peers together; None if unlimited."""
    effective_batch: float | None = None
    """Fraction of the ranks whose gradients are in the mean."""
    more_steps: float | None = None
    """Fraction of extra steps that theory predicts for the same training loss, at the measured `lost`."""

    @property
    def line_share(self) -> float | None:
        """Bandwidth in use: sent over allowed rate."""
        return self.sent / self.line if self.line else None


def network_cost(job_snapshot: JobSnapshot) -> NetworkCost:
    """Returns the cost of the network for a job: now while it runs, otherwise over the whole run."""
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
    """Predicted fraction of extra steps for this loss, under the job's policy."""
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
