"""HTTP server of `stormtorch watch`: the page, its data, and metrics, for a few readers."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stormtorch.watch.prometheus import CONTENT_TYPE
from stormtorch.watch.watcher import Watcher
from stormtorch.watch.web import pages
from stormtorch.watch.web.access_guard import HEADERS, AccessGuard, bearer

_log = logging.getLogger("stormtorch")
# The page polls every two seconds. Without readers, records are collected less often, but before ranks drop them.
_EVERY_S, _UNSEEN_EVERY_S = 2.0, 10.0
_UNSEEN_AFTER_S = 15.0
_MOST_CONNECTIONS = 64
# A connection without a request for this long is closed: browsers open some in advance, strangers may open many.
_IDLE_S = 5.0
_HELP = "Open the address that `stormtorch watch` printed: it contains the token."


class Guarded:
    """Middleware that passes only requests that the guard accepts. Others learn nothing, not even which paths exist."""

    def __init__(self, app: ASGIApp, guard: AccessGuard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, with_headers)

    def _answer(self, request: Request) -> Response | None:
        if (problem := self._guard.problem(request.headers)) is not None:
            return PlainTextResponse(f"{problem}\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This server is read-only.\n", 405)
        given = request.query_params.get("token")
        if self._guard.is_valid_token(request.cookies.get(self._guard.cookie)) or self._guard.is_valid_token(
            bearer(request.headers)
        ):
            return RedirectResponse("/", 303) if given is not None and request.url.path == "/" else None
        if not self._guard.is_valid_token(given):
            return PlainTextResponse(f"{_HELP}\n", 401)
        if request.url.path != "/":
            return None
        # The cookie is enough from now on: redirect, so that the token is no longer in the address.
        found = RedirectResponse("/", 303)
        found.set_cookie(self._guard.cookie, self._guard.token, httponly=True, samesite="lax", path="/")
        return found


def new_app(watcher: Watcher, guard: AccessGuard) -> Starlette:
    """Makes the application: the page, its files, its data, and metrics for Prometheus."""
    seen = time.monotonic()

    async def page(_: Request) -> Response:
        return Response(pages.index(), media_type="text/html")

    async def asset(request: Request) -> Response:
        found = pages.page_file(request.path_params["name"])
        return PlainTextResponse("Not found.\n", 404) if found is None else Response(found[0], media_type=found[1])

    async def data(request: Request) -> Response:
        nonlocal seen
        seen = time.monotonic()
        since, width_s = request.query_params.get("since", ""), request.query_params.get("width", "")
        first = int(since) if since.isascii() and since.isdecimal() and len(since) < 6 else 0
        try:
            width = float(width_s[:20])
        except ValueError:
            width = 0.0
        return Response(await asyncio.to_thread(watcher.as_json, first, width), media_type="application/json")

    async def metrics(_: Request) -> Response:
        nonlocal seen
        seen = time.monotonic()
        return Response(await asyncio.to_thread(watcher.metrics), media_type=CONTENT_TYPE)

    async def collect() -> None:
        while True:
            try:
                await asyncio.to_thread(watcher.read)
            except Exception as error:  # the page must survive any answer of a rank; the next request may succeed
                _log.warning("cannot read %s: %s", watcher.source.name, error)
            begun = time.monotonic()
            while time.monotonic() - begun < (
                _EVERY_S if time.monotonic() - seen < _UNSEEN_AFTER_S else _UNSEEN_EVERY_S
            ):
                await asyncio.sleep(_EVERY_S)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(collect())
        try:
            yield
        finally:
            task.cancel()

    routes = [Route("/", page), Route("/assets/{name}", asset), Route("/data", data), Route("/metrics", metrics)]
    return Starlette(routes=routes, lifespan=lifespan, middleware=[Middleware(Guarded, guard=guard)])


def listen(host: str, port: int) -> socket.socket:
    """Opens the port. Raises `OSError` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_MOST_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


class IdleTimeoutProtocol(H11Protocol):
    """Closes idle connections after a timeout, and the oldest one at once if there are too many."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Accepts a connection."""
        super().connection_made(transport)
        self._wait()
        # Closed connections stay in the set until the next turn of the event loop.
        there = [
            each
            for each in self.connections
            if isinstance(each, IdleTimeoutProtocol) and not each.transport.is_closing()
        ]
        idle = [each for each in there if each.idle and each is not self]
        if len(there) > _MOST_CONNECTIONS and idle:
            min(idle, key=lambda each: each.since).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timeout of the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._wait()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered. A partial request counts as idle: it may never be complete."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or bool(cycle.response_complete)

    def _wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.since = self.loop.time()
        self._deadline = self.loop.call_later(_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        if self.idle:
            self.transport.close()


class _Quiet(uvicorn.Server):
    """Checks for shutdown twice a second, not ten times: the server shares the machine with the job."""

    async def main_loop(self) -> None:
        """Waits for shutdown; to uvicorn, every tick is a tenth of a second."""
        ticks = 0
        while not await self.on_tick(ticks):
            await asyncio.sleep(0.5)
            ticks = (ticks + 5) % 864_000


def server_of(watcher: Watcher, guard: AccessGuard) -> uvicorn.Server:
    """Makes the server."""
    config = uvicorn.Config(
        new_app(watcher, guard),
        log_level="warning",
        access_log=False,
        server_header=False,
        http=IdleTimeoutProtocol,
        ws="none",
        limit_concurrency=2 * _MOST_CONNECTIONS,  # beyond those that may be idle
        timeout_keep_alive=int(_IDLE_S),
        timeout_graceful_shutdown=1,
    )
    return _Quiet(config)


def serve(watcher: Watcher, guard: AccessGuard, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM."""
    server_of(watcher, guard).run(sockets=[listener])
