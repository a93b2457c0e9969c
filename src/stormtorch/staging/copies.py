# mypy: disable-error-code="no-untyped-call"
"""Copies between a GPU and pinned memory, on separate streams, so that the caller's stream keeps computing."""

import threading

import torch


class Lane:
    """Two copy streams of one GPU: results coming back must not queue behind inputs that are still being computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.away = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)


_lanes: dict[torch.device, Lane] = {}
_lock = threading.Lock()


def _lane(device: torch.device) -> Lane:
    with _lock:
        if device not in _lanes:
            _lanes[device] = Lane(device)
        return _lanes[device]


class Visit:
    """Copies of one collective on one GPU. They run after the work queued on the caller's stream before the call."""

    def __init__(self, device: torch.device) -> None:
        self._lane = _lane(device)
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
        self._lane.away.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._lane.away):
            host.copy_(tensor, non_blocking=True)
        # Keep torch from reusing the tensor's memory before the copy is done.
        tensor.record_stream(self._lane.away)
        self._fetches = True

    def fetched(self) -> torch.cuda.Event | None:
        """Returns the event that follows all copies to the host, or None if there are none."""
        if not self._fetches:
            return None
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
        event.record(self._lane.away)
        return event

    def bring(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Starts a copy into a tensor, to run after all work queued before the call."""
        self._lane.back.wait_event(self._called)
        with torch.cuda.stream(self._lane.back):
            tensor.copy_(values, non_blocking=True)
        for each in (tensor, values):
            if each.is_cuda:
                each.record_stream(self._lane.back)
        self._returned = self._lane.back.record_event()

    def join(self) -> None:
        """Makes the current stream wait for the copies started by `bring`. Returns at once."""
        if self._returned is not None:
            torch.cuda.current_stream(self.device).wait_event(self._returned)

    def stream(self) -> "torch.cuda.StreamContext":
        """Selects the stream that brings results: whoever reads a future completed on it waits for those copies."""
        return torch.cuda.stream(self._lane.back)
