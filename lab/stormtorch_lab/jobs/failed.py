"""Error of a job of several ranks. It has a file of its own, as running ranks imports torch, which takes seconds."""

from stormtorch.checks import CommandFailed


class RankFailed(CommandFailed):
    """Raised when a rank raised an error, died, or did not end in time. `rank` is None where it was the whole job."""

    def __init__(self, message: str, *, rank: int | None = None, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details
        """Traceback of the rank, if it left one."""
