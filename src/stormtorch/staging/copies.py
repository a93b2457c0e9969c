"""Copies between a GPU and pinned memory on separate streams, so that the caller's stream keeps computing."""
# mypy: disable-error-code="no-untyped-call"

import threading

import torch


class CopyStreams:
    """Two copy streams of one GPU: results must not queue behind inputs that are still being computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host = torch.cuda.Stream(device)
        self.to_device = torch.cuda.Stream(device)


_copy_streams_by_device: dict[torch.device, CopyStreams] = {}
_lock = threading.Lock()


def _copy_streams(device: torch.device) -> CopyStreams:
    with _lock:
        if device not in _copy_streams_by_device:
            _copy_streams_by_device[device] = CopyStreams(device)
        return _copy_streams_by_device[device]


class DeviceCopies:
    """Copies of one collective on one GPU. They run after the work queued on the caller's stream before the call."""

    def __init__(self, device: torch.device) -> None:
        self._copy_streams = _copy_streams(device)
        self.device = device
        self._called = torch.cuda.current_stream(device).record_event()
        self._returned: torch.cuda.Event | None = None
        self._fetches = False

    def room(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocates pinned memory for a tensor's values."""
        return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Starts a copy to new pinned memory, which holds the values once the event from `fetched` has happened."""
        host = self.room(tensor, tensor.dtype)
        self.fetch_into(host, tensor)
        return host

    def fetch_into(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Starts a copy to given pinned memory, which holds the values once the event from `fetched` has happened."""
        # Also wait for what the call itself queued on the caller's stream, such as a conversion to another dtype.
        self._copy_streams.to_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_streams.to_host):
            host.copy_(tensor, non_blocking=True)
        # Keep torch from reusing the tensor's memory before the copy is done.
        tensor.record_stream(self._copy_streams.to_host)
        self._fetches = True

    def fetched(self) -> torch.cuda.Event | None:
        """Returns the event that follows all copies to the host, or None if there are none."""
        if not self._fetches:
            return None
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
        event.record(self._copy_streams.to_host)
        return event

    def bring(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Starts a copy into a tensor, to run after all work queued before the call."""
        self._copy_streams.to_device.wait_event(self._called)
        with torch.cuda.stream(self._copy_streams.to_device):
            tensor.copy_(values, non_blocking=True)
        for each in (tensor, values):
            if each.is_cuda:
                each.record_stream(self._copy_streams.to_device)
        self._returned = self._copy_streams.to_device.record_event()

    def join(self) -> None:
        """Makes the current stream wait for the copies started by `bring`. Returns at once."""
        if self._returned is not None:
            torch.cuda.current_stream(self.device).wait_event(self._returned)

    def stream(self) -> "torch.cuda.StreamContext":
        """Selects the stream of the results: readers of a future that was completed on it wait for those copies."""
        return torch.cuda.stream(self._copy_streams.to_device)
