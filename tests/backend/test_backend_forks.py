"""Processes that are forked from a rank: they are not in the job, and cannot end it."""

import pytest

from backend_job import Job, free_ports


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_forked_child_can_neither_end_the_job_nor_hang_in_it() -> None:
    with Job("backend_forked.py", "", 2, free_ports(3)) as job:
        said = job.end(within_s=100)
        job.check_nothing_is_left()
    for rank in said:
        assert rank["exit"] == 0, rank["stderr"][-3000:]
        assert "hung" not in rank
        assert rank["before"] == rank["after_children"] == rank["finally_"] == 2000.0
        assert rank["loaded"] == [2.0 * number for number in range(8)]
        assert "terminate" not in rank["stderr"], rank["stderr"]
    for call in ("all_reduce", "wait", "barrier", "send"):
        assert said[0][call].startswith("Closed after 0 s: "), said[0][call]
        assert "forked" in said[0][call]
    assert "rank 0: all_reduce: process" in said[0]["all_reduce"]
    assert said[0]["destroyed"] and said[0]["after_use"]
