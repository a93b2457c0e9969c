"""What a job of several ranks fails with. It stands apart from what runs them, as that takes torch and thus seconds."""


class RankFailed(RuntimeError):
    """A rank raised an error, died, or did not end in time. `rank` is None where it was the whole job."""

    def __init__(self, message: str, *, rank: int | None = None, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details
        """The rank's own traceback, if it left one."""
