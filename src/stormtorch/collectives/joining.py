"""`join`: coming into a running job as a rank beyond those of its start."""

from stormtorch.collectives.group import Group
from stormtorch.transport.leaving import say_goodbye_on_error
from stormtorch.transport.newcomer import addresses, come_in
from stormtorch.transport.options import Options


def join(address: str, options: Options | None = None) -> Group:
    """Comes into a running job, and returns once all its ranks have agreed on a view that includes this process.

    No store is needed: any rank of the job that is alive can be asked, at the port that is in its log and, unless that
    was taken, is its UDP port too. Give the group to `prepare`: the others then hand over what a new rank needs.

    Args:
        address: Host and port of a rank of the job; several, divided by commas, are tried one after the other.
        options: Settings of this process. `key` must be the job's.

    Returns:
        The group of all members of the view.

    Raises:
        NotAdmitted: No rank answers, or the job does not let this process in; the error names addresses and reasons.
    """
    transport = come_in(addresses(address), options or Options())
    say_goodbye_on_error(transport)
    view = transport.endpoint.view()
    assert view is not None  # it came in by one
    return Group(transport, [rank for rank, _ in view.members], name=transport.name, view=view.number)
