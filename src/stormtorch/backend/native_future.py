"""Futures whose value C++ can read, for DDP's built-in hook FP16_COMPRESS.

A future made in Python holds a Python object, whatever its value. DDP's C++ reads such an object everywhere except in
its built-in hook FP16_COMPRESS, which needs a C++ list of tensors. Only TorchScript can make a future that holds one
and is completed later: by a function that waits for our future and returns the tensors.

TorchScript completes such a future on one of its own threads, of which there are only as many as cores. A callback in
Python may wait for a later collective, as PowerSGD's do, and would block all of them; so Python code never gets such a
future.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence

import torch

Tensors = list[torch.Tensor]
Future = torch.futures.Future[Tensors]


def wanted(results: Sequence[torch.Tensor]) -> bool:
    """Whether the calling method was called from C++, with tensors as the built-in hook has them."""
    if not results or any(each.dtype is not torch.float16 for each in results):
        return False
    asked, caller = sys._getframe(1), sys._getframe(1).f_back
    # Python code contains the name of a method that it calls. A call from C++ comes from code without it, or from none.
    return caller is None or asked.f_code.co_name not in caller.f_code.co_names


def readable(future: Future, tensors: Tensors) -> Future:
    """Returns a future that completes with the tensors when `future` completes, and fails when it fails."""
    return _compiled()(future, tensors)


_SOURCE = """
def after(signal: Future[List[Tensor]], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(signal)
    return tensors

def readable(signal: Future[List[Tensor]], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, signal, tensors)
"""


@functools.cache
def _compiled() -> Callable[[Future, Tensors], Future]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, but has no replacement here
        script: Callable[[Future, Tensors], Future] = torch.jit.CompilationUnit(_SOURCE).readable
        return script
