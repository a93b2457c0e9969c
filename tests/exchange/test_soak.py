"""Random collectives give the same bits over shared memory, datagrams and several hosts; ranks die in their midst.

The short versions of `make soak`.
"""

import pytest

import soak
import soak_kills
from stormtorch_lab.netns.fixtures import lab_or_skip


@pytest.mark.slow
def test_random_collectives_give_the_same_bits_over_shared_memory_and_by_datagram() -> None:
    assert soak.check(7, 300, [soak.MEMORY, soak.UDP], most_bytes=1 << 20) == []


@pytest.mark.lab
@pytest.mark.slow
def test_random_collectives_give_the_same_bits_on_hosts_with_two_ranks_each() -> None:
    lab_or_skip()
    assert soak.check(8, 200, [soak.MEMORY, soak.MIXED, soak.MIXED_UDP], most_bytes=1 << 20) == []


@pytest.mark.slow
def test_ranks_that_are_killed_are_named_and_leave_nothing_and_the_others_go_on() -> None:
    took = soak_kills.run_job(seed=3, kills=2)
    assert len(took) == 4 + 3
    assert max(took) < soak_kills.SILENCE_S + soak_kills.SLACK_S
