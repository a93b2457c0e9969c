"""What stormtorch does, shown on one machine: all-reduce while a tenth of the datagrams is lost."""

import time
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from stormtorch.bench.backends import BACKENDS, Backend, Storm, open_backends
from stormtorch.bench.display import Advance, ignore_progress, loss_text, new_table, share_text, size_text, time_text
from stormtorch.bench.ranks import Member, run_ranks
from stormtorch.bench.samples import Counters, Log, Sample, median, merge
from stormtorch.bench.settings import check_between
from stormtorch.bench.stage import Stage, in_turn
from stormtorch.faults import faults


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What to show."""

    hosts: int = 4
    """Ranks, each a process of this machine."""
    mb: float = 25.0
    """Size of the tensor in 10^6 bytes."""
    rounds: int = 20
    loss: float = 0.1
    """Fraction of the datagrams that is lost on every link."""
    seed: int = 0
    limit_s: float = 30.0
    """No round begins later than this after the first: a slow machine shows fewer."""
    timeout_s: float = 300.0
    """For everything."""

    def __post_init__(self) -> None:
        check_between("hosts", self.hosts, 2, 64)
        check_between("mb", self.mb, 0.1, 1000)
        check_between("rounds", self.rounds, 1, 10_000)
        check_between("loss", self.loss, 0.0, 0.9)
        check_between("seed", self.seed, 0, 2**31)
        check_between("limit_s", self.limit_s, 0.1, 3600)
        check_between("timeout_s", self.timeout_s, 1, 1e6)


@dataclass
class RankStory:
    """What one rank saw."""

    log: Log = field(default_factory=lambda: Log([]))
    exact_rounds: int = 0
    """Rounds in which storm's sum had the bits of the sum in rank order."""
    gloo_same_bits: bool = True
    gloo_furthest: float = 0.0
    """Largest difference between gloo's sum and the sum in rank order."""
    lossy_errors: list[float] = field(default_factory=list)
    """Of each round: distance of the lossy mean from the true one, relative to the true one's length."""
    link_loss: dict[int, float] = field(default_factory=dict)
    """Of what each peer sent to storm's exact transport, as the engine measured it."""
    counters: dict[str, Counters] = field(default_factory=dict)
    """Of each storm backend."""


@dataclass(frozen=True)
class DemoReport:
    """What all ranks saw."""

    settings: DemoSettings
    samples: list[Sample]
    """Every call, merged over the ranks, in order."""
    ranks: list[RankStory]

    @property
    def rounds(self) -> int:
        """How many there were."""
        return len(self.samples) // len(BACKENDS)

    def loss_measured(self, backend: str) -> float:
        """Fraction of a storm backend's datagrams that was lost, over all links."""
        return sum((rank.counters[backend] for rank in self.ranks), Counters()).loss

    @property
    def lossy_error(self) -> float:
        """Relative error of the lossy mean, averaged over ranks and rounds."""
        return sum(sum(rank.lossy_errors) for rank in self.ranks) / (self.rounds * len(self.ranks))

    def of(self, backend: str) -> list[Sample]:
        """The calls of one backend."""
        return [sample for sample in self.samples if sample.backend == backend]


def run_demo(settings: DemoSettings, advance: Advance = ignore_progress) -> DemoReport:
    """Runs the ranks and returns when they are gone.

    Raises:
        stormtorch.bench.failed.RankFailed: A rank failed or did not end in time.
    """

    def listen(_rank: int, what: object) -> None:
        assert isinstance(what, tuple)
        advance(*what)

    ranks = run_ranks(tell_story, settings.hosts, (settings,), timeout_s=settings.timeout_s, listen=listen)
    return DemoReport(settings, merge([rank.log for rank in ranks]).samples, ranks)


def tell_story(member: Member, settings: DemoSettings) -> RankStory:
    """One rank's part."""
    story = RankStory()
    own, total = _contributions(member, settings)
    work = torch.empty_like(own)
    backends = open_backends(BACKENDS, member)
    storms = [backend for backend in backends if isinstance(backend, Storm)]
    with Stage(member, backends) as stage, faults(loss=settings.loss, seed=settings.seed):

        def timed(backend: Backend, round_index: int) -> Sample:
            tensor = work.copy_(own)
            return stage.timed(backend, lambda: backend.all_reduce(tensor), tensor.nbytes, round_index)

        for backend in backends:  # connections and caches warm up
            timed(backend, 0)
        begin = time.monotonic()
        for round_index in range(settings.rounds):
            if not stage.everywhere(time.monotonic() - begin < settings.limit_s or round_index == 0):
                break
            took: dict[str, float] = {}
            for backend in in_turn(backends, round_index):
                sample = timed(backend, round_index)
                story.log.samples.append(sample)
                took[backend.name] = sample.seconds
                _judge(story, backend.name, work, total)
            if member.rank == 0:
                times = ", ".join(f"{name} {time_text(took[name])}" for name in BACKENDS)
                member.tell((times, round_index + 1))
        exact = storms[0]
        story.link_loss = {peer: exact.transport.link(peer)[1] for peer in range(member.world) if peer != member.rank}
        story.counters = {storm.name: Counters.of(storm.transport) for storm in storms}
    return story


def _contributions(member: Member, settings: DemoSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tensor, and the sum of all in rank order. Like gradients: a common signal, and noise of each rank."""
    elements = round(settings.mb * 1e6 / 4)
    signal = torch.randn(elements, generator=torch.Generator().manual_seed(settings.seed))
    own = total = torch.empty(0)
    for rank in range(member.world):
        noise = torch.Generator().manual_seed(settings.seed + 1 + rank)
        tensor = torch.randn(elements, generator=noise).add_(signal)
        total = tensor.clone() if rank == 0 else total.add_(tensor)
        if rank == member.rank:
            own = tensor
    return own, total


def _judge(story: RankStory, backend: str, result: torch.Tensor, total: torch.Tensor) -> None:
    if backend == "storm-lossy":
        story.lossy_errors.append(float(torch.dist(result, total) / total.norm()))
        return
    same = torch.equal(result.view(torch.int32), total.view(torch.int32))
    if backend == "storm":
        story.exact_rounds += same
    elif not same:
        story.gloo_same_bits = False
        story.gloo_furthest = max(story.gloo_furthest, float((result - total).abs().max()))


def show_demo(report: DemoReport, console: Console) -> None:
    """Two tables and what they mean."""
    console.print(_backend_table(report))
    console.print(_link_table(report))
    for sentence in sentences(report):
        console.print(f"- {sentence}", highlight=False)


def _backend_table(report: DemoReport) -> Table:
    settings = report.settings
    table = new_table(
        f"{report.rounds} all-reduces of {size_text(round(settings.mb * 1e6))} over {settings.hosts} ranks"
    )
    table.add_column("backend")
    table.add_column("datagrams\nlost", justify="right")
    table.add_column("arrived", justify="right")
    table.add_column("chunks\nsent again", justify="right")
    table.add_column("median", justify="right")
    table.add_column("worst", justify="right")
    for backend in BACKENDS:
        samples = report.of(backend)
        times_s = [sample.seconds for sample in samples]
        table.add_row(
            backend,
            "none injected" if backend == "gloo" else loss_text(report.loss_measured(backend)),
            share_text(sum(sample.arrived for sample in samples) / len(samples)),
            "-" if backend == "gloo" else f"{sum(sample.repaired for sample in samples) / len(samples):.0f} per round",
            time_text(median(times_s)),
            time_text(max(times_s)),
        )
    return table


def _link_table(report: DemoReport) -> Table:
    world = report.settings.hosts
    table = new_table("loss that storm measured on each link")
    table.add_column("rank")
    for peer in range(world):
        table.add_column(f"from {peer}", justify="right")
    for rank, story in enumerate(report.ranks):
        losses = (loss_text(story.link_loss[peer]) if peer in story.link_loss else "" for peer in range(world))
        table.add_row(str(rank), *losses)
    return table


def sentences(report: DemoReport) -> list[str]:
    """What was seen, in words; every number is of this run."""
    rounds, ranks = report.rounds, report.ranks
    repaired = sum(sample.repaired for sample in report.of("storm"))
    exact = min(rank.exact_rounds for rank in ranks)
    if all(rank.gloo_same_bits for rank in ranks):
        beside = "as does gloo's"
    else:
        furthest = max(rank.gloo_furthest for rank in ranks)
        beside = f"gloo adds in another order and differs from it by up to {furthest:.1e}"
    lossy = report.of("storm-lossy")
    missing = 1 - sum(sample.arrived for sample in lossy) / len(lossy)
    return [
        f"storm met {loss_text(report.loss_measured('storm'))} loss and sent {repaired:,} chunks again; in {exact} of "
        f"{rounds} rounds, its result equals the sum in rank order bit for bit on every rank; {beside}.",
        f"storm-lossy sent nothing again: {loss_text(missing)} of the chunks stayed lost, and the mean of what arrived "
        f"is off the true mean by {loss_text(report.lossy_error)} of its length (each tensor: a common signal plus "
        "noise as large).",
        "gloo met no loss, as it cannot be injected below TCP without root, so its times are those of an undisturbed "
        "network: compare them with storm's knowing that.",
    ]
