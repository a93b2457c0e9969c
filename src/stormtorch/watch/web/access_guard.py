"""Access control of the page: every request needs the token and must be addressed to this server.

The page shows host names and what a job does. Loopback alone does not protect it: a browser sends requests on behalf of
any page that it has open.
"""

import contextlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: no foreign resources, no framing, no caching."""


class AccessGuard:
    """Checks requests.

    Args:
        host: Address or name that the server listens on.
        port: Port that it listens on; part of the cookie's name, because browsers ignore the port of a cookie.
        token: Secret; None makes a random one.
    """

    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self.cookie = f"stormtorch_watch_{port}"
        self._loopback = is_loopback(host)
        self._names = {"localhost"} if self._loopback else {"localhost", host.lower(), *own_names()}

    def is_valid_token(self, token: str | None) -> bool:
        """Whether this is the token; compares in constant time."""
        return token is not None and hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def problem(self, headers: Mapping[str, str]) -> str | None:
        """Returns why the headers of a request are refused, apart from its token; None if they are fine.

        The requested host must be this one, not a name that a hostile page has pointed here (DNS rebinding); a numeric
        address cannot be rebound. Requests from other pages are refused.
        """
        host = headers.get("host", "")
        if not self._meant(host):
            return "The request asks for another host."
        origin = headers.get("origin")
        if origin is not None and _host_and_port(origin) != host.lower():
            return "The request comes from another page."
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return "The request comes from another page."
        return None

    def _meant(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name.lower().rstrip(".") in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._loopback


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at this address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_names() -> set[str]:
    """Names of this machine as it knows them itself, short and with its domain. Other names that resolve to it do not
    count: anyone can point a name here.
    """
    host = socket.gethostname()
    names = {host, host.partition(".")[0], socket.getfqdn(host)}
    with contextlib.suppress(OSError):
        name, others, _ = socket.gethostbyname_ex(host)
        names |= {name, *others}
    return {each.lower().rstrip(".") for each in names if each}


def bearer(headers: Mapping[str, str]) -> str | None:
    """The token in a header `Authorization: Bearer TOKEN`, as Prometheus sends it."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and token else None


def _host_and_port(origin: str) -> str:
    """Host and port of an origin; empty if it is malformed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
