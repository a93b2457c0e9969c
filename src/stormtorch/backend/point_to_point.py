"""Sends, receives and barriers of a process group, as torch.distributed calls them."""
# mypy: disable-error-code="override, assignment, attr-defined"

import time
from datetime import timedelta
from typing import Any

import torch

from stormtorch import collectives
from stormtorch.backend.any_source import PostedReceive
from stormtorch.backend.launching import Launching
from stormtorch.backend.tensors import Staged, one
from stormtorch.backend.work import StormWork
from stormtorch.errors import Closed, ExchangeTimeout, StormError

_MONITOR_TAG = -7
_POLL_S = 0.002


class PointToPoint(Launching):
    """Part of a process group that sends, receives and waits at barriers."""

    # --- sends and receives -----------------------------------------------------------------------------------------

    def send(self, tensors: Any, target: int, tag: int) -> StormWork:
        """Sends a tensor to one rank."""
        staged = Staged("send")
        tensor = one(tensors, "send")
        given = staged.read(tensor)
        return self.begin_work(
            "send",
            lambda: [collectives.send(self.group, given, target, tag=tag, timeout_s=self._timeout_s)],
            [tensor],
            staged,
            peer=target,
        )

    def recv(self, tensors: Any, source: int, tag: int) -> StormWork:
        """Receives a tensor from one rank."""
        tensor = one(tensors, "recv")
        staged = Staged("recv")
        out = staged.write(tensor)
        return self.begin_work(
            "recv",
            lambda: [self._receives.from_source(out, source, tag, self._timeout_s)],
            [tensor],
            staged,
            source=lambda: source,
            peer=source,
        )

    def recv_anysource(self, tensors: Any, tag: int) -> StormWork:
        """Receives a tensor from whichever rank sends first."""
        tensor = one(tensors, "recv")
        staged = Staged("recv")
        out = staged.write(tensor)
        begun: list[PostedReceive] = []

        def begin() -> list[PostedReceive]:
            begun.append(self._receives.from_any_source(out, tag, self._timeout_s))
            return begun

        return self.begin_work("recv", begin, [tensor], staged, source=lambda: begun[0].source if begun else None)

    # --- barriers ---------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> StormWork:
        """Starts a barrier, which ends when all ranks of the group have called this."""
        timeout_s = self._timeout(opts, timeout)
        return self.begin_work(
            "barrier", lambda: [collectives.barrier(self.group, timeout_s=timeout_s)], [], Staged("barrier")
        )

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Waits at a barrier whose error names the ranks that did not arrive.

        Args:
            timeout: How long to wait; a number means seconds, None takes the group's time-out.
            wait_all_ranks: Name all missing ranks, not only the first.
        """
        self.check_owner("monitored_barrier")
        requested = self._timeout_s if timeout is None else timeout
        seconds = min(
            requested.total_seconds() if isinstance(requested, timedelta) else float(requested), self._timeout_limit_s
        )
        if self.group.rank == 0 and seconds <= 0:
            raise ExchangeTimeout("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms.")
        self._order.flush()
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if self.group.rank != 0:
            try:
                for start in (collectives.send, collectives.receive):
                    start(self.group, token, 0, tag=_MONITOR_TAG, timeout_s=seconds).wait()
            except StormError as error:
                raise type(error)(
                    f"[Rank {self.group.rank}]: Rank {self.group.rank} successfully reached monitoredBarrier, but "
                    f"received errors while waiting for send/recv from rank 0: {error}"
                ) from error
            return
        waiting = {
            peer: collectives.receive(self.group, token.clone(), peer, tag=_MONITOR_TAG, timeout_s=seconds + 1.0)
            for peer in range(1, self.group.size)
        }
        give_up_at = time.monotonic() + seconds
        while waiting and time.monotonic() < give_up_at:
            for peer in [peer for peer, pending in waiting.items() if pending.done()]:
                try:
                    waiting[peer].wait()
                except Closed:
                    raise
                except StormError:
                    give_up_at = 0.0
                else:
                    del waiting[peer]
            time.sleep(_POLL_S)
        if waiting:
            missing = sorted(waiting) if wait_all_ranks else [min(waiting)]
            names = ", ".join(map(str, missing))
            raise ExchangeTimeout(
                f"[Rank 0]: Rank{'s' if len(missing) > 1 else ''} {names} failed to pass monitoredBarrier in "
                f"{1000 * seconds:.0f} ms"
            )
        going = [
            collectives.send(self.group, token, peer, tag=_MONITOR_TAG, timeout_s=seconds)
            for peer in range(1, self.group.size)
        ]
        for each in going:
            each.wait()
