"""Several ranks on each host of a lab: they detect it, and the hierarchical all-reduce sends half as much."""

import pytest
import torch

from commands import ranks_left, text_of
from stormtorch.checks import BadSetting
from stormtorch.collectives import Group, all_reduce
from stormtorch.collectives.pipeline import Pipeline
from stormtorch.exchange.options import Options
from stormtorch.joining.rendezvous import connect
from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
from stormtorch_lab.cli.tables.bench import allreduce_table
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import Conditions, Lab
from stormtorch_lab.netns.fixtures import lab_or_skip

LINE = Conditions(rate="50mbit")


def test_ranks_per_host_must_divide_the_ranks_of_a_lab() -> None:
    assert AllReduceSettings(ranks=8, ranks_per_host=2, network=LINE, backends=("storm-flat",)).hosts == 4
    for ranks, each, network in ((8, 3, LINE), (4, 4, LINE), (8, 0, LINE), (8, 2, None)):
        with pytest.raises(BadSetting, match="ranks_per_host"):
            AllReduceSettings(ranks=ranks, ranks_per_host=each, network=network)
    with pytest.raises(BadSetting, match="storm-flat only in a lab"):
        AllReduceSettings(ranks=8, backends=("storm-flat",))


def layout(member: Member) -> tuple[object, float]:
    options = Options(interface=member.interface)
    with connect(member.store, member.rank, member.world, options) as transport:
        group = Group(transport)
        tensor = torch.full((300_000,), float(member.rank))
        pending = all_reduce(group, tensor)
        pending.wait()
        assert isinstance(pending, Pipeline)
        assert torch.equal(tensor, tensor[:1].expand_as(tensor))
        return group.node_layout and group.node_layout.machines, float(tensor[0])


@pytest.mark.lab
@pytest.mark.slow
def test_ranks_find_out_which_of_them_share_a_host() -> None:
    lab_or_skip()
    with Lab(2, management=True, probe=False) as lab:
        found = run_ranks(layout, 4, timeout_s=60, lab=lab, per_host=2)
    assert found == [(((0, 1), (2, 3)), 6.0)] * 4


@pytest.mark.lab
@pytest.mark.slow
def test_hierarchy_takes_about_half_the_time_of_the_flat_exchange() -> None:
    lab_or_skip()
    settings = AllReduceSettings(
        ranks=4,
        ranks_per_host=2,
        mb=(4.0,),
        iters=3,
        warmup=1,
        backends=("storm", "storm-flat"),
        network=LINE,
        timeout_s=100,
    )
    report = run_allreduce(settings)
    ours, flat = report.results
    assert ours.ideal_s == pytest.approx(0.64)  # the data that each of two hosts must send
    assert ours.median_s < 0.75 * flat.median_s
    assert "4 ranks, 2 on each host" in text_of(allreduce_table(report))
    assert ranks_left() == []
