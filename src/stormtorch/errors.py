"""Network errors. Each message names the rank, the peer, the operation, what is missing and what to change."""


class StormError(RuntimeError):
    """Base of all errors that stormtorch raises about the network."""

    culprit: int | None = None
    """Transport rank that caused the error first, as far as is known, whichever rank reported it."""


class PeerSilent(StormError):
    """Nothing was received from a peer for `silence_s` while an exact exchange needed it."""


class PeerLeft(StormError):
    """A peer closed its transport while an exact exchange needed it, perhaps because of an error of its own."""


class PeerFailed(StormError):
    """A peer ended the same exact exchange with an error, could not join the job, or corrupted a shared-memory channel.

    The message says why.
    """


class PathBlocked(StormError):
    """A peer answered, but for `silence_s` no data reached it: the path carries only small datagrams."""


class Unreachable(StormError):
    """NAT traversal between two ranks failed when the job began."""


class ExchangeTimeout(StormError, TimeoutError):
    """An exchange did not end within its timeout."""


class RanksMissing(StormError, TimeoutError):
    """Some ranks did not reach the rendezvous store when the job began."""


class NotAdmitted(StormError):
    """A running job did not admit this process; the message says which rank refused, and why."""


class SizeMismatch(StormError):
    """Two ranks called the same collective with tensors of different sizes."""


class Interrupted(StormError):
    """A wait was aborted because the members of the job are changing. Never reaches the user."""


class Closed(StormError):
    """The transport was closed while an exchange was running, or before it began."""
