"""The parameter barrier: a forward pre-hook on each module waits for parameters in flight before the module runs."""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from stormtorch.exchange.waiting import in_call
from stormtorch.runtime.memory.bucket import Bucket

_log = logging.getLogger("stormtorch")


class ParameterBarrier:
    """Lets `step` return before parameters have arrived: each module waits for its own when it is about to run.

    Args:
        model: The model whose modules wait.
        buckets: Buckets that hold the parameters.
        receive: Called once per bucket in flight; returns when its parameters have arrived.
        on_complete: Called when all buckets have arrived.
        overlap: Whether modules wait; otherwise `close` waits for everything.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        receive: Callable[[Bucket], None],
        on_complete: Callable[[], None],
        *,
        overlap: bool,
    ) -> None:
        self.overlap = overlap and not _compiled(model)
        self.waited_s = 0.0
        """Seconds of waiting since the barrier was closed."""
        self._buckets = buckets
        self._receive = receive
        self._on_complete = on_complete
        self._closed: set[int] = set()
        self._receiving = False
        bucket_of = {id(parameter): bucket.index for bucket in buckets for parameter in bucket.parameters}
        if self.overlap:
            for module in model.modules():
                if any(id(parameter) in bucket_of for parameter in module.parameters(recurse=False)):
                    # Includes its children's: nn.MultiheadAttention reads their parameters without calling them.
                    needed = sorted(
                        {bucket_of[id(each)] for each in module.parameters() if id(each) in bucket_of}, reverse=True
                    )
                    module.register_forward_pre_hook(self._hook(needed))

    @property
    def is_open(self) -> bool:
        """Whether no parameters are in flight."""
        return not self._closed and not self._receiving

    def close(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Called when parameters are in flight, by default all of them. Waits for them unless modules do."""
        self.waited_s = 0.0
        self._closed = {bucket.index for bucket in (self._buckets if buckets is None else buckets)}
        if not self.overlap:
            self.open()

    def open(self, indices: Sequence[int] | None = None) -> None:
        """Waits for some buckets, or for all."""
        if not self._closed:
            return
        began = time.perf_counter()
        self._receiving = True
        try:
            with in_call("forward of a prepared model"):
                for index in sorted(self._closed, reverse=True) if indices is None else indices:
                    if index in self._closed:
                        self._closed.remove(index)
                        self._receive(self._buckets[index])
        finally:
            self._receiving = False
        self.waited_s += time.perf_counter() - began
        if not self._closed:
            self._on_complete()

    def used(self, index: int) -> None:
        """Called when a bucket's parameters have gradients. If no module waited for them, `step` will from now on."""
        if index in self._closed and self.overlap:
            _log.warning(
                "parameters were used before they had arrived, by code that was compiled before prepare() or that "
                "reads them without calling their module: from now on, step() waits for them, as with overlap=False"
            )
            self.overlap = False

    def _hook(self, needed: list[int]) -> Callable[[nn.Module, object], None]:
        # A function, not a method, so that copies of the model share it and do not copy the barrier.
        def wait(_module: nn.Module, _args: object) -> None:
            if not torch.compiler.is_compiling():
                if self._closed:
                    self.open(needed)
            elif self.overlap:
                self._compiling()

        return wait

    @torch._dynamo.disable(  # type: ignore[no-untyped-call, untyped-decorator]  # torch's
        reason="a prepared model waits for its parameters: compile it before prepare(), or use overlap=False"
    )
    def _compiling(self) -> None:
        """Makes `step` wait from now on, as compiled code cannot. The next compilation has no graph break here."""
        self.open()
        self.overlap = False


def _compiled(model: nn.Module) -> bool:
    return any(
        isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
