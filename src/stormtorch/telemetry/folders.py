"""Private folders and files: other users of the machine cannot read, write or replace them."""

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

FLIGHTS_VARIABLE = "STORM_FLIGHT_DIR"
"""Environment variable with the folder for flight records; the default is one that only this user can read."""
FLIGHTS = "stormtorch-flights"
"""First part of the default folder's name."""


def flights_folder() -> Path:
    """Returns the folder into which ranks of this user write flight records.

    Raises:
        PermissionError: The path exists, but is no private folder of this user.
    """
    chosen = os.environ.get(FLIGHTS_VARIABLE)
    return Path(chosen) if chosen else own_folder(tempfile.gettempdir(), FLIGHTS)


def own_folder(base: str, name: str) -> Path:
    """Returns a folder that only this user can read and write.

    Args:
        base: Parent folder, which other users may share, as that for temporary files.
        name: Name of the folder, to which the user's number is added.

    Raises:
        PermissionError: The path exists, but is no private folder of this user.
    """
    folder = Path(base) / f"{name}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a directory that only this user can read and write")
    return folder


def write_new(folder: Path, name: str, text: str) -> Path:
    """Writes a new file that only this user can read, never an existing one, and returns its path.

    Raises:
        OSError: It cannot be written. A partial file, as after a full disk, is removed: it would break programs that
            read all files of the folder.
    """
    path = folder / name
    try:
        descriptor = _create(path)
    except FileExistsError:
        path = folder / f"{path.stem}-{secrets.token_hex(4)}{path.suffix}"
        descriptor = _create(path)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
