"""Checks the newest wheels in a folder: what is in them, their tags, and that they work where there is no compiler.

    python check_wheel.py dist

torch and the other dependencies come from the Python that runs this; stormtorch from its wheel alone, and then with
the lab's.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {"stormtorch": ROOT / "src" / "stormtorch", "stormtorch_lab": ROOT / "lab" / "stormtorch_lab"}
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja", "make")


def check_content(wheel: Path, package: str) -> None:
    """Raises AssertionError if a file is missing or does not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = [name for name in names if re.fullmatch(rf"{package}/_engine\.[\w.-]+\.so", name)]
    assert len(modules) == 1, f"{wheel.name} must have one native module, got {modules}"
    relays = [name for name in names if re.fullmatch(rf"{package}-[\w.]+\.data/scripts/stormtorch-relay", name)]
    assert len(relays) == (package == "stormtorch_lab"), f"the relay belongs to the lab's wheel alone: {wheel.name}"
    expected = {
        f"{package}/{path.relative_to(SOURCES[package]).as_posix()}"
        for path in SOURCES[package].rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc")
    }
    missing = sorted(expected - names)
    assert not missing, f"{wheel.name} lacks {', '.join(missing)}"
    others = {name for name in names - expected - {*modules, *relays} if not name.endswith("/")}
    foreign = sorted(name for name in others if ".dist-info/" not in name)
    assert not foreign, f"{wheel.name} has {', '.join(foreign)}, which nobody asked for"


def check_tag(wheel: Path) -> None:
    """Raises AssertionError unless the wheel is for one architecture and as many versions of Python as it can be."""
    _, _, python, abi, platform = wheel.stem.split("-")
    assert re.match(r"manylinux_2_\d+_(x86_64|aarch64)", platform), f"{wheel.name} is for {platform}: not repaired?"
    if sys.version_info >= (3, 12):
        assert (python, abi) == ("cp312", "abi3"), f"{wheel.name} must be for Python 3.12 and all newer ones"
    else:
        assert python == abi == "cp311", f"{wheel.name} must be for Python 3.11"


def try_without_compiler(wheels: list[Path]) -> None:
    """Installs wheels into a fresh environment, one after the other, and tries each with nothing but Python."""
    with tempfile.TemporaryDirectory() as folder:
        place, tools = Path(folder) / "venv", Path(folder) / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        python = place / "bin" / "python"
        # The dependencies, and no other stormtorch.
        (site,) = (place / "lib").glob("python3*/site-packages")
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "stormtorch" not in path.name and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
        tools.mkdir()
        for name in ("env", "ldconfig", "uname"):
            found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
            if found:
                (tools / name).symlink_to(found)
        environment = {"PATH": f"{place / 'bin'}:{tools}", "HOME": folder, "LANG": "C.UTF-8"}
        found_tools = [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]
        assert not found_tools, f"{', '.join(found_tools)} can be found, so this shows nothing"
        trial = Path(__file__).with_name("try_wheel.py")
        for wheel in wheels:
            subprocess.run([python, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", str(wheel)], check=True)
            subprocess.run([python, str(trial)], env=environment, cwd=folder, check=True)


def main() -> None:
    wheels = []
    for package in SOURCES:
        found = sorted(Path(sys.argv[1]).glob(f"{package}-*.whl"), key=os.path.getmtime)
        if not found:
            raise SystemExit(f"{sys.argv[1]} has no wheel of {package}")
        wheels.append(found[-1].resolve())
        check_content(wheels[-1], package)
        check_tag(wheels[-1])
    try_without_compiler(wheels)
    for wheel in wheels:
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
