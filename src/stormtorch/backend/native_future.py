"""Futures whose value C++ can read.

A future made in Python holds a Python object, whatever is put into it. DDP's C++ reads such an object everywhere but in
its built-in hook FP16_COMPRESS, which insists on a list of tensors of C++'s own kind. Only TorchScript makes a future
that holds one and is completed later: by a function that waits for ours and returns the tensors.

TorchScript's threads complete it, and they are as few as there are cores. A callback in Python may wait for a later
collective, as PowerSGD's do, and would stop them all; so Python never gets such a future.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence

import torch

Tensors = list[torch.Tensor]
Future = torch.futures.Future[Tensors]


def wanted(results: Sequence[torch.Tensor]) -> bool:
    """Whether whoever called our caller is C++, with tensors such as the built-in hook has."""
    if not results or any(each.dtype is not torch.float16 for each in results):
        return False
    asked, caller = sys._getframe(1), sys._getframe(1).f_back
    # Python code names the method that it calls. C++ calls on behalf of code that does not, or without any.
    return caller is None or asked.f_code.co_name not in caller.f_code.co_names


def readable(future: Future, tensors: Tensors) -> Future:
    """Completes with the tensors when `future` does, and fails when it fails."""
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
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole; nothing else does this
        script: Callable[[Future, Tensors], Future] = torch.jit.CompilationUnit(_SOURCE).readable
        return script
