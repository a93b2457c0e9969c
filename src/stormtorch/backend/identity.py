"""Identity of a process group: name, rank, size, timeout, and the features that torch queries."""
# mypy: disable-error-code="override, assignment, attr-defined, misc"

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stormtorch.collectives import Group


class Identity(dist.ProcessGroup):
    """Part of a process group that holds its name, rank, size and timeout."""

    def __init__(self, group: Group, store: Store, timeout: timedelta, timeout_limit_s: float) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # declared with a store, but created without one
        self.group = group
        self._store = store
        self._timeout_limit_s = timeout_limit_s
        self.set_timeout(timeout)
        self._group_name, self._group_desc = group.name, ""
        self._sequence = 0

    def getBackendName(self) -> str:
        """Returns the backend's name, under torch's older name of the method."""
        return "storm"

    def name(self) -> str:
        """Returns the backend's name."""
        return "storm"

    def getRank(self) -> int:
        """Returns the rank of this process in the group, under torch's older name of the method."""
        return self.group.rank

    def getSize(self) -> int:
        """Returns the number of processes, under torch's older name of the method."""
        return self.group.size

    def rank(self) -> int:
        """Returns the rank of this process in the group."""
        return self.group.rank

    def size(self) -> int:
        """Returns the number of processes in the group."""
        return self.group.size

    def setGroupName(self, name: str) -> None:
        """Sets the group's name."""
        self._group_name = name

    def getGroupName(self) -> str:
        """Returns the group's name."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:
        """Sets the group's description."""
        self._group_desc = text

    def getGroupDesc(self) -> str:
        """Returns the group's description."""
        return self._group_desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """Description of the group."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        # torch puts data without a device, such as pickled objects, on the first of these.
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, _device: torch.device) -> "Identity":
        return self

    def _get_backend_name(self) -> str:
        return "storm"

    @property
    def supports_coalescing(self) -> bool:
        """True: several collectives may be started between `_start_coalescing` and `_end_coalescing`."""
        return True

    @property
    def supports_splitting(self) -> bool:
        """False: only `new_group` makes groups."""
        return False

    @property
    def supports_time_estimate(self) -> bool:
        """False: storm does not estimate how long a collective takes."""
        return False

    @property
    def supports_tensor_alloc(self) -> bool:
        """False: tensors need no special memory."""
        return False

    def get_group_store(self) -> Store:
        """Returns the store of the group's rendezvous."""
        return self._store

    @property
    def timeout_s(self) -> float:
        """Default timeout of collectives, in seconds."""
        return self._timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default timeout of collectives; the options' `timeout_s` applies if it is shorter."""
        self._timeout_s = min(timeout.total_seconds(), self._timeout_limit_s)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence
