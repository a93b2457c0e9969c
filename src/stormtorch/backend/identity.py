# mypy: disable-error-code="override, assignment, attr-defined, misc"
"""What a process group is: its names, its rank and size, and what torch asks about it before it calls anything."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stormtorch.collectives import Group


class Identity(dist.ProcessGroup):
    """The part of a process group that says who it is."""

    def __init__(self, group: Group, store: Store, timeout: timedelta, longest_s: float) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # declared with a store, made without
        self.group = group
        self._store = store
        self._longest_s = longest_s
        self.set_timeout(timeout)
        self._group_name, self._group_desc = group.name, ""
        self._sequence = 0

    def getBackendName(self) -> str:
        """For torch."""
        return "storm"

    def name(self) -> str:
        """For torch."""
        return "storm"

    def getRank(self) -> int:
        """For torch."""
        return self.group.rank

    def getSize(self) -> int:
        """For torch."""
        return self.group.size

    def rank(self) -> int:
        """Of this process in the group."""
        return self.group.rank

    def size(self) -> int:
        """How many processes."""
        return self.group.size

    def setGroupName(self, name: str) -> None:
        """For torch."""
        self._group_name = name

    def getGroupName(self) -> str:
        """For torch."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:
        """For torch."""
        self._group_desc = text

    def getGroupDesc(self) -> str:
        """For torch."""
        return self._group_desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        """For torch."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """For torch."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        # The first is where torch puts what has no place of its own, such as pickled objects.
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, _device: torch.device) -> "Identity":
        return self

    def _get_backend_name(self) -> str:
        return "storm"

    @property
    def supports_coalescing(self) -> bool:
        """Several collectives may be started between `_start_coalescing` and `_end_coalescing`."""
        return True

    @property
    def supports_splitting(self) -> bool:
        """Groups are made by `new_group` alone."""
        return False

    @property
    def supports_time_estimate(self) -> bool:
        """No estimates of what a collective would take."""
        return False

    @property
    def supports_tensor_alloc(self) -> bool:
        """Any memory will do."""
        return False

    def get_group_store(self) -> Store:
        """The store that the group met in."""
        return self._store

    @property
    def timeout_s(self) -> float:
        """Of collectives that are given none of their own."""
        return self._timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        """Of collectives that are given none of their own; the options' `timeout_s` holds where it is shorter."""
        self._timeout_s = min(timeout.total_seconds(), self._longest_s)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence
