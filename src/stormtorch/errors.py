"""What can go wrong, each with the rank, the peer, the operation, what is missing and what to change."""


class StormError(RuntimeError):
    """Base of all errors that stormtorch raises about the network."""

    culprit: int | None = None
    """Rank in the transport whose fault it was, as far as is known: the first cause, whoever told of it."""


class PeerSilent(StormError):
    """A peer was not heard of for `silence_s` while an exact exchange needed it."""


class PeerLeft(StormError):
    """A peer closed its transport while an exact exchange needed it, perhaps because of an error that it met itself."""


class PeerFailed(StormError):
    """A peer ended the same exact exchange with an error, or could not join the job, and told why."""


class PathBlocked(StormError):
    """A peer answered for `silence_s`, but no data reached it: its path carries small datagrams only."""


class ExchangeTimeout(StormError, TimeoutError):
    """An exchange did not end within its time-out."""


class RanksMissing(StormError, TimeoutError):
    """Some ranks did not come to the store in which a job meets."""


class SizeMismatch(StormError):
    """Two ranks called the same collective with tensors of different sizes."""


class Closed(StormError):
    """The transport was closed while an exchange was running, or before it began."""
