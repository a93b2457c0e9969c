"""A check for `stormtorch doctor`: whether this machine can run a lab."""

import shutil
from collections.abc import Iterator

from stormtorch.doctor.diagnosis import Diagnosis, Level
from stormtorch_lab.netns.access import LabUnavailable
from stormtorch_lab.netns.lab import try_lab


def check_lab() -> Iterator[Diagnosis]:
    """Opens a lab and closes it."""
    try:
        access = try_lab()
    except LabUnavailable as error:
        yield Diagnosis(
            subject="lab",
            level=Level.NOTE,
            text="`stormtorch lab` cannot run here; training does not need it",
            remedy=str(error),
        )
    else:
        how = "in a user namespace" if access.user_namespace else "as root"
        tools = ", ".join(each for each in ("ip", "tc", "nft", "ethtool") if shutil.which(each))
        yield Diagnosis(subject="lab", level=Level.OK, text=f"possible {how} ({tools})")
