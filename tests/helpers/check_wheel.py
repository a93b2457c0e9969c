"""Checks the newest wheel in a folder: what is in it, its tag, and that it works where there is no compiler.

    python check_wheel.py dist

torch and the other dependencies come from the Python that runs this; stormtorch itself from the wheel alone.
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

SOURCE = Path(__file__).parents[2] / "src" / "stormtorch"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja", "make")


def check_content(wheel: Path) -> None:
    """Raises AssertionError if a file is missing or does not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = [name for name in names if re.fullmatch(r"stormtorch/_engine\.[\w.-]+\.so", name)]
    assert len(modules) == 1, f"{wheel.name} must have one native module, got {modules}"
    relays = [name for name in names if re.fullmatch(r"stormtorch-[\w.]+\.data/scripts/stormtorch-relay", name)]
    assert relays, f"{wheel.name} lacks the relay of the network lab"
    expected = {
        f"stormtorch/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
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


def try_without_compiler(wheel: Path) -> None:
    """Installs the wheel into a fresh environment, and trains there with nothing but Python on the path."""
    with tempfile.TemporaryDirectory() as folder:
        place, tools = Path(folder) / "venv", Path(folder) / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        python = place / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", str(wheel)], check=True)
        # Behind the environment's own packages: torch is found there, and stormtorch in the environment itself.
        (site,) = (place / "lib").glob("python3*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        tools.mkdir()
        for name in ("env", "ldconfig", "uname"):
            found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
            if found:
                (tools / name).symlink_to(found)
        environment = {"PATH": f"{place / 'bin'}:{tools}", "HOME": folder, "LANG": "C.UTF-8"}
        found_tools = [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]
        assert not found_tools, f"{', '.join(found_tools)} can be found, so this shows nothing"
        where = subprocess.run(
            [python, "-c", "import stormtorch; print(stormtorch.__file__)"],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert where.stdout.startswith(str(place)), f"stormtorch was found at {where.stdout.strip()}"
        trial = Path(__file__).with_name("try_wheel.py")
        subprocess.run([python, str(trial)], env=environment, cwd=folder, check=True)


def main() -> None:
    wheels = sorted(Path(sys.argv[1]).glob("stormtorch-*.whl"), key=os.path.getmtime)
    if not wheels:
        raise SystemExit(f"{sys.argv[1]} has no wheel of stormtorch")
    wheel = wheels[-1].resolve()
    check_content(wheel)
    check_tag(wheel)
    try_without_compiler(wheel)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
