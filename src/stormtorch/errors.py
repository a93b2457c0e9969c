"""Errors of the network. Each message names the rank, the peer, the operation, what is missing and what to change."""


class StormError(RuntimeError):
    """Base of all errors that stormtorch raises about the network."""

    culprit: int | None = None
    """Rank in the transport that caused the error first, as far as is known, whichever rank reported it."""


class PeerSilent(StormError):
    """Nothing was heard from a peer for `silence_s` while an exact exchange needed it."""


class PeerLeft(StormError):
    """A peer closed its transport while an exact exchange needed it, perhaps because of an error of its own."""


class PeerFailed(StormError):
    """A peer ended the same exact exchange with an error, could not join the job, or wrote nonsense into memory that it
    shares with this rank; the message says why.
    """


class PathBlocked(StormError):
    """A peer answered for `silence_s`, but no data reached it: the path carries only small datagrams."""


class Unreachable(StormError):
    """Two ranks behind routers that translate addresses found no way to each other when the job began."""


class ExchangeTimeout(StormError, TimeoutError):
    """An exchange did not end within its timeout."""


class RanksMissing(StormError, TimeoutError):
    """Some ranks did not come to the store in which the ranks of a job meet."""


class NotAdmitted(StormError):
    """A running job did not let this process in; the message says which rank refused, and why."""


class SizeMismatch(StormError):
    """Two ranks called the same collective with tensors of different sizes."""


class Interrupted(StormError):
    """A wait was given up because the members of the job are changing. Never reaches the user."""


class Closed(StormError):
    """The transport was closed while an exchange was running, or before it began."""
