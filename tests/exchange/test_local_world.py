"""The helper that runs ranks as threads raises the first error, not those that follow from it."""

import pytest
from conftest import local_world

from stormtorch.collectives import Group, barrier
from stormtorch.udp.udp import UdpTransport


def test_the_error_of_the_rank_that_failed_is_raised_and_not_that_of_one_it_left_waiting() -> None:
    def work(transport: UdpTransport) -> None:
        group = Group(transport)
        barrier(group).wait()
        if transport.rank == 0:
            raise ValueError("this came first")
        barrier(group).wait()

    with pytest.raises(ValueError, match="this came first"):
        local_world(3, work)
