"""`join`: late join of a running job, as a rank beyond those of its start."""

from stormtorch.collectives.base.group import Group
from stormtorch.exchange.options import Options
from stormtorch.joining.join_client import join_running_job
from stormtorch.udp.addresses import addresses
from stormtorch.udp.leaving import say_goodbye_on_error


def join(address: str, options: Options | None = None) -> Group:
    """Joins a running job, as a rank beyond those of its start.

    Pass the group to `prepare` when the model is ready: the ranks then agree on a view that includes this process, and
    transfer the state that it needs. No store is needed: any live rank of the job answers join requests, at the TCP
    port in its log, which has the number of its UDP port unless that was taken.

    Args:
        address: Host and port of a rank of the job; several, separated by commas, are tried one after the other.
        options: Settings of this process. `key` must be the job's.

    Returns:
        The ranks of the start, and this one.

    Raises:
        NotAdmitted: No rank answers, or the job refuses this process; the error names addresses and reasons.
    """
    transport = join_running_job(addresses(address), options or Options())
    say_goodbye_on_error(transport)
    return Group(transport, [*range(transport.world), transport.rank], name=transport.name)
