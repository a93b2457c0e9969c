# mypy: disable-error-code="no-untyped-call"
"""Tensors on a GPU: copies to and from pinned memory, on streams of their own, so that nobody waits who need not."""

import threading

import torch


class Lane:
    """The two streams of a GPU. Two, because what comes back must not queue behind what is not yet computed."""

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
    """What one collective does on one GPU. What the caller's stream was given before the call comes first."""

    def __init__(self, device: torch.device) -> None:
        self._lane = _lane(device)
        self.device = device
        self._called = torch.cuda.current_stream(device).record_event()
        self._returned: torch.cuda.Event | None = None
        self._fetches = False

    def room(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory for a tensor's values."""
        return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory that will hold a tensor's values when `fetched` has happened."""
        host = self.room(tensor, tensor.dtype)
        self.fetch_into(host, tensor)
        return host

    def fetch_into(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies a tensor's values to pinned memory; they are there when `fetched` has happened."""
        # What the call itself made of it on the caller's stream, another dtype for instance, comes first too.
        self._lane.away.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._lane.away):
            host.copy_(tensor, non_blocking=True)
        # Its memory is not given to others before the copy is made.
        tensor.record_stream(self._lane.away)
        self._fetches = True

    def fetched(self) -> torch.cuda.Event | None:
        """Happens when all copies to the host are made; None without any."""
        if not self._fetches:
            return None
        event = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
        event.record(self._lane.away)
        return event

    def bring(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Copies into a tensor, later than all that was before the call."""
        self._lane.back.wait_event(self._called)
        with torch.cuda.stream(self._lane.back):
            tensor.copy_(values, non_blocking=True)
        for each in (tensor, values):
            if each.is_cuda:
                each.record_stream(self._lane.back)
        self._returned = self._lane.back.record_event()

    def join(self) -> None:
        """The current stream goes on when all that was brought is there; the caller does at once."""
        if self._returned is not None:
            torch.cuda.current_stream(self.device).wait_event(self._returned)

    def stream(self) -> "torch.cuda.StreamContext":
        """On which the results are; a future that is completed there makes others wait for them."""
        return torch.cuda.stream(self._lane.back)
