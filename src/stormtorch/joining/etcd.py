"""etcd as the rendezvous store: it outlives all ranks, and the loss of a minority of its own machines."""
# mypy: disable-error-code="override"

import base64
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

_SHORTEST_NAP_S, _LONGEST_NAP_S = 2e-3, 0.1


class EtcdStore(Store):
    """A torch.distributed store in etcd 3.4 or newer. It uses the JSON form of the v3 API and needs no client package.

    Keys are never deleted by themselves: give each job its own prefix.

    Args:
        addresses: Addresses of the cluster, such as "host:2379", separated by commas; one that answers is enough. With
            "https://" before a host, the system's certificates are checked.
        prefix: Prefix of all keys, such as the name of the job.
        timeout_s: Longest time to wait for a key.
        request_s: Longest time of one request to one address.
    """

    def __init__(
        self, addresses: str, prefix: str = "stormtorch", *, timeout_s: float = 300.0, request_s: float = 5.0
    ) -> None:
        super().__init__()
        self._addresses = [_address(each.strip()) for each in addresses.split(",")]
        self._prefix = prefix
        self._request_s = request_s
        self.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value."""
        self._request("put", {"key": self._key(key), "value": _text(value)})

    def get(self, key: str) -> bytes:
        """Reads a value; waits for it if there is none.

        Raises:
            DistStoreError: There is none within the store's timeout.
        """
        self.wait([key])
        found = self._read(key)
        if found is None:
            raise DistStoreError(f"etcd: key {key!r} was deleted")
        return found[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 if it does not exist yet, and returns the sum."""
        while True:
            found = self._read(key)
            before, revision = (int(found[0]), found[1]) if found else (0, 0)
            if amount == 0:
                return before  # reading is enough
            if self._put_if(key, str(before + amount), revision):
                return before + amount

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes a value if the present one equals `expected`; returns the value that is there afterwards.

        An empty `expected` also matches a missing key.
        """
        wanted = expected.encode() if isinstance(expected, str) else expected
        while True:
            found = self._read(key)
            if (found[0] if found else b"") != wanted:
                return found[0] if found else wanted
            if self._put_if(key, desired, found[1] if found else 0):
                return desired.encode() if isinstance(desired, str) else desired

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist. Never waits."""
        reads = [{"request_range": {"key": self._key(key), "keys_only": True}} for key in keys]
        # One transaction of etcd holds 128 requests.
        for start in range(0, len(reads), 100):
            answer = self._request("txn", {"success": reads[start : start + 100]})
            if not all(int(each["response_range"].get("count", 0)) for each in answer.get("responses", ())):
                return False
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist.

        Raises:
            DistStoreError: Some do not exist in time.
        """
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        give_up_at, nap_s = time.monotonic() + limit.total_seconds(), _SHORTEST_NAP_S
        while not self.check(keys):
            if time.monotonic() >= give_up_at:
                raise DistStoreError(f"etcd: no keys {list(keys)} within {limit.total_seconds():g} s")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it existed."""
        return int(self._request("deleterange", {"key": self._key(key)}).get("deleted", 0)) > 0

    def num_keys(self) -> int:
        """Number of keys under the prefix."""
        start = f"{self._prefix}/".encode()
        end = start[:-1] + bytes([start[-1] + 1])
        answer = self._request("range", {"key": _text(start), "range_end": _text(end), "count_only": True})
        return int(answer.get("count", 0))

    def _read(self, key: str) -> tuple[bytes, int] | None:
        """Value of a key, and the revision in which it was written."""
        found = self._request("range", {"key": self._key(key)}).get("kvs")
        if not found:
            return None
        return base64.b64decode(found[0].get("value", "")), int(found[0]["mod_revision"])

    def _put_if(self, key: str, value: str | bytes, revision: int) -> bool:
        """Writes a value if the key has not been written since a revision; 0 stands for a missing key."""
        unchanged = {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        put = {"request_put": {"key": self._key(key), "value": _text(value)}}
        return bool(self._request("txn", {"compare": [unchanged], "success": [put]}).get("succeeded"))

    def _key(self, key: str) -> str:
        return _text(f"{self._prefix}/{key}")

    def _request(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        failures: list[str] = []
        for address in list(self._addresses):
            try:
                return _post(address, f"/v3/kv/{what}", request, self._request_s)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{address.netloc}: {str(error) or type(error).__name__}")
                self._addresses = [*(each for each in self._addresses if each != address), address]
        # The type of error that torch's own stores raise when their server is gone.
        raise RuntimeError(f"etcd does not answer: {'; '.join(failures)}")


def _address(text: str) -> urllib.parse.ParseResult:
    address = urllib.parse.urlparse(text if "//" in text else f"http://{text}")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f'addresses of etcd must be "host:2379", separated by commas, got {text!r}')
    return address


def _post(address: urllib.parse.ParseResult, path: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    host, port = str(address.hostname), address.port or 2379
    connection = (
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=ssl.create_default_context())
        if address.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    try:
        connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {body.decode(errors='replace').strip()[:200]}")
        said: dict[str, Any] = json.loads(body)
        return said
    finally:
        connection.close()


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()
