"""A rank that dies and rejoins as a new process, over loopback, while the others train."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from conftest import store_of_threads

from stormtorch import Options, connect, exact
from stormtorch.exchange.exchange import Transport

T = TypeVar("T")
OPTIONS = Options(silence_s=1.0, timeout_s=30.0, linger_s=0.2)


def with_a_rank_that_returns(
    begin: Callable[[Transport, bool], tuple[Any, Any]],
    step: Callable[[Any, Any], None],
    look: Callable[[Any], T],
    *,
    first: Callable[[Any], None] = lambda _model: None,
    before: Callable[[Transport], None] | None = None,
    world: int = 3,
    within_s: float = 40.0,
) -> list[T]:
    """Returns what `look` finds on every rank, some steps after the last rank has come back.

    Args:
        begin: Prepares a model; told whether this is the process that comes back.
        step: Makes one step.
        look: Called under `exact` with the model.
        first: Called with the model after the first steps, on all ranks.
        before: Called on the last rank with the transport of a process that comes back in vain, before the right one.
        world: Number of ranks.
        within_s: Seconds after which a rank is said to hang.
    """
    store, found, errors = store_of_threads(), {}, []

    def body(rank: int) -> None:
        try:
            found[rank] = live(rank)
        except BaseException as error:
            errors.append(error)

    def live(rank: int) -> T:
        transport = connect(store, rank, world, OPTIONS)
        model, optimizer = begin(transport, False)
        for _ in range(2):
            step(model, optimizer)
        first(model)
        if rank == world - 1:
            step(model, optimizer)
            transport.close(0.2)
            if before is not None:
                transport = connect(store, rank, world, replace(OPTIONS, rejoin=True))
                before(transport)
                transport.close(0.2)
            transport = connect(store, rank, world, replace(OPTIONS, rejoin=True))
            model, optimizer = begin(transport, True)
        else:
            while optimizer.session.view.number == 1 or len(optimizer.session.view.members) < world:
                step(model, optimizer)
                time.sleep(0.01)
        until = optimizer.session.view.step + 4
        while optimizer.session.steps < until:
            step(model, optimizer)
        with exact(model):
            seen = look(model)
        transport.drain()
        transport.close()
        return seen

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world)]
    for each in threads:
        each.start()
    end = time.monotonic() + within_s
    for each in threads:
        each.join(max(end - time.monotonic(), 0.0))
    if errors:
        raise errors[0]
    assert len(found) == world, f"of {world} ranks only {sorted(found)} have ended"
    return [found[rank] for rank in range(world)]
