"""The error of a failed job. A separate file, as `ranks.py` imports torch, which takes seconds."""

from stormtorch.checks import CommandFailed


class RankFailed(CommandFailed):
    """Raised when a rank raised an error, died, or timed out. `rank` is None if the whole job failed."""

    def __init__(self, message: str, *, rank: int | None = None, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details
        """Traceback of the rank, if it left one."""
