"""`join`: coming into a running job as a rank beyond those of its start."""

from stormtorch.collectives.base.group import Group
from stormtorch.exchange.options import Options
from stormtorch.joining.join_client import join_running_job
from stormtorch.udp.addresses import addresses
from stormtorch.udp.leaving import say_goodbye_on_error


def join(address: str, options: Options | None = None) -> Group:
    """Takes a place in a running job, as a rank beyond those of its start.

    Give the group to `prepare`, when the model is ready: then the ranks agree on a view that includes this process, and
    hand over what it needs. No store is needed: any rank of the job that is alive can be asked, at the port that is in
    its log and, unless that was taken, is its UDP port too.

    Args:
        address: Host and port of a rank of the job; several, divided by commas, are tried one after the other.
        options: Settings of this process. `key` must be the job's.

    Returns:
        The ranks of the start, and this one.

    Raises:
        NotAdmitted: No rank answers, or the job does not let this process in; the error names addresses and reasons.
    """
    transport = join_running_job(addresses(address), options or Options())
    say_goodbye_on_error(transport)
    return Group(transport, [*range(transport.world), transport.rank], name=transport.name)
