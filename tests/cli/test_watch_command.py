"""`stormtorch watch` on records of a real training, while it runs and afterwards."""

import os
import pty
import re
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import ENVIRONMENT, STORMTORCH, call
from watched_job import WatchedJob


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """Folder of a job whose rank 1 loses a fifth of its input, and the output of `--once`, live and by folder."""
    folder = tmp_path_factory.mktemp("run")
    with WatchedJob(3, folder, links={(0, 1): 0.2, (2, 1): 0.2}, key=b"a secret of the job") as job:
        job.wait(60)
        os.environ["STORM_KEY"] = "a secret of the job"
        code, live = call("watch", job.addresses[2], "--once")
        assert code == 0, live
        del os.environ["STORM_KEY"]
        code, refused = call("watch", job.addresses[2], "--once")
        assert code == 1, refused
    yield folder, live, refused


def test_a_finished_run_is_judged_by_its_folder(run: tuple[Path, str, str]) -> None:
    code, text = call("watch", str(run[0]), "--once")
    assert code == 0
    assert re.search(r"Rank 1 on \S+ loses \d+ % of what it receives, from every sender", text)
    assert re.search(r"^stormtorch watch +done · 3 ranks on 1 host · [\d,]+ steps · BoundedDrift", text, re.M)
    assert "net.core.rmem_max" in text


def test_a_live_job_is_judged_by_the_address_of_one_rank(run: tuple[Path, str, str]) -> None:
    assert re.search(r"Rank 1 on \S+ loses \d+ % of what it receives, from every sender", run[1])
    assert "running · 3 ranks" in run[1]


def test_a_live_job_tells_nothing_without_its_key(run: tuple[Path, str, str]) -> None:
    assert "key" in run[2]
    assert "loses" not in run[2]


def test_where_there_is_no_terminal_it_prints_lines_and_ends_with_the_job(run: tuple[Path, str, str]) -> None:
    code, text = call("watch", str(run[0]))
    assert code == 0
    assert len(text.splitlines()) == 1
    assert re.match(r"\d\d:\d\d:\d\d, done, [\d,]+ steps, .* a step, .* network, .* lost\. Rank 1 on", text)


@pytest.mark.thorough
def test_a_run_becomes_a_report_a_picture_and_a_table(run: tuple[Path, str, str], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("run.html", "run.png", "run.csv")]
    code, text = call(
        "watch", str(run[0]), *("--export", str(files[0])), *("--export", str(files[1])), "--csv", str(files[2])
    )
    assert code == 0, text
    assert text.splitlines() == [f"wrote {file}" for file in files]
    assert "loses" in files[0].read_text()
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert files[2].read_text().startswith("time,")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "none given"),
        (("nowhere",), 2, "there is no folder nowhere: start the job with STORM_RECORD=nowhere"),
        ((__file__,), 2, "is a file: name its folder"),
        (("127.0.0.1:1", "--once"), 1, "no rank of a job answers"),
        (("EMPTY", "--once"), 1, "No rank has reported yet"),
        (("EMPTY", "--export", "x.html"), 2, "holds no records yet"),
        (("EMPTY", "--export", "x.docx"), 2, "must end with one of"),
        (("EMPTY", "--web", "--port", "99999"), 2, "--port"),
        (("EMPTY", "--web", "--port", "0", "--host", "256.1.1.1"), 2, "cannot listen at 256.1.1.1:0"),
    ],
)
def test_what_makes_no_sense_is_one_message(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found, text = call("watch", *(str(tmp_path) if each == "EMPTY" else each for each in arguments))
    assert found == code, text
    assert message in " ".join(text.replace("│", " ").split())
    assert "Traceback" not in text


@pytest.mark.thorough
def test_without_the_extra_the_page_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['starlette.applications'] = None; from stormtorch.cli.app import main; main()"
    command = [STORMTORCH[0], "-c", program, "watch", str(tmp_path), "--web"]
    found = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "pip install 'stormtorch[watch]'" in found.stderr


@pytest.mark.thorough
def test_the_page_is_served_until_ctrl_c(run: tuple[Path, str, str]) -> None:
    command = [*STORMTORCH, "watch", str(run[0]), "--web", "--port", "0"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
            data = address.replace("/?", "/data?")
            with urllib.request.urlopen(data, timeout=30) as answer:
                assert b"what it receives, from every sender" in answer.read()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["q", "\x03"])
def test_the_screen_ends_at_q_and_at_ctrl_c_and_leaves_the_terminal_as_it_was(
    run: tuple[Path, str, str], how: str
) -> None:
    terminal, inside = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    process = subprocess.Popen(
        [*STORMTORCH, "watch", str(run[0])],
        env=environment,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        preexec_fn=_lead,
    )
    os.close(inside)
    shown = b""
    until = time.monotonic() + 60
    while b"from every sender" not in shown and time.monotonic() < until:
        shown += _read(terminal)
    os.write(terminal, how.encode())
    while process.poll() is None and time.monotonic() < until:
        shown += _read(terminal)
    shown += _read(terminal)
    os.close(terminal)
    assert process.wait(5) == (0 if how == "q" else 130)
    assert b"\x1b[?1049h" in shown
    assert b"\x1b[?1049l" in shown, "the previous screen must be restored"
    assert b"Traceback" not in shown


def _lead() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536) if select.select([terminal], [], [], 0.2)[0] else b""
    except OSError:  # the other end is closed
        return b""
