"""Registry of running labs: a folder for each, with a socket through which other commands query and change it."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stormtorch.telemetry.folders import own_folder
from stormtorch_lab.netns.access import LabError

_LONGEST_REQUEST = 1 << 24
_TIMEOUT_S = 30.0
_RECORD, _SOCKET = "record.json", "socket"

RequestHandler = Callable[[dict[str, Any]], dict[str, Any]]


def registry() -> Path:
    """Folder of this user's labs, which no other user can read or write."""
    try:
        return own_folder(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), "stormtorch-labs")
    except PermissionError as error:
        raise LabError(str(error)) from None


class Registration:
    """Entry of one running lab. Its thread answers requests until `close`."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = registry() / self.name
        """Folder for files of the lab; `close` removes it with everything in it."""
        self.folder.mkdir(mode=0o700)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread: threading.Thread | None = None
        self.record([])

    def record(self, holders: Sequence[int]) -> None:
        """Records the processes that `clean` must kill if they outlive this one."""
        record = {"owner": _identity(os.getpid()), "holders": [_identity(pid) for pid in holders]}
        (self.folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")

    def serve(self, answer: RequestHandler) -> None:
        """Starts to serve requests."""
        self._socket.bind(str(self.folder / _SOCKET))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, args=(answer,), daemon=True, name="stormtorch lab")
        self._thread.start()

    def close(self) -> None:
        """Removes the entry."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(2.0)
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self, answer: RequestHandler) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_TIMEOUT_S)
                try:
                    reply = answer(json.loads(_receive(connection)))
                except Exception as error:  # report any error to the requesting command
                    reply = {"error": str(error), "name": getattr(error, "name", None)}
                connection.sendall(json.dumps(reply).encode())


class Refused(LabError):
    """A running lab rejected a change; `name` is the condition at fault, if any."""

    def __init__(self, problem: str, name: str | None) -> None:
        super().__init__(problem)
        self.name = name


def running() -> list[str]:
    """Names of the labs whose owner still runs."""
    return [entry.name for entry in _entries() if _is_alive(_record(entry).get("owner"))]


def send_request(name: str | None, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request to a lab and returns its reply, with its name as "lab"; None means the only running lab."""
    names = running()
    if name is None:
        if len(names) != 1:
            several = f"several labs are running: choose one by --lab: {', '.join(names)}"
            raise LabError(several if names else "no lab is running")
        name = names[0]
    elif name not in names:
        raise LabError(f"no lab {name!r} is running; running labs: {', '.join(names) or 'none'}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(registry() / name / _SOCKET))
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            reply: dict[str, Any] = json.loads(_receive(connection))
        except (OSError, ValueError) as error:
            raise LabError(f"lab {name} does not answer: {error}") from error
    if "error" in reply:
        raise Refused(reply["error"], reply.get("name"))
    return reply | {"lab": name}


def clean() -> list[str]:
    """Removes the remains of labs whose owner has ended; returns a line for each thing removed."""
    done = []
    for entry in _entries():
        record = _record(entry)
        if _is_alive(record.get("owner")):
            continue
        for holder in record.get("holders", []):
            if _is_alive(holder):
                with contextlib.suppress(OSError):
                    os.kill(holder["pid"], signal.SIGKILL)
                    done.append(f"process {holder['pid']} of lab {entry.name}")
        shutil.rmtree(entry, ignore_errors=True)
        done.append(f"entry of lab {entry.name}")
    return done


def _entries() -> list[Path]:
    return sorted(path for path in registry().iterdir() if path.is_dir())


def _record(entry: Path) -> dict[str, Any]:
    try:
        record = json.loads((entry / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _identity(pid: int) -> dict[str, int]:
    """Id of a process and its start time, as process ids are reused."""
    return {"pid": pid, "began": _began(pid) or 0}


def _began(pid: int) -> int | None:
    """Start time of a process; None if it has ended, even if its parent has not reaped it yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_alive(identity: object) -> bool:
    if not isinstance(identity, dict):
        return False
    pid, began = identity.get("pid"), identity.get("began")
    return isinstance(pid, int) and pid > 1 and _began(pid) == began


def _receive(connection: socket.socket) -> bytes:
    data = bytearray()
    while piece := connection.recv(65536):
        data += piece
        if len(data) > _LONGEST_REQUEST:
            raise ValueError("the request is too long")
    return bytes(data)
