"""The page's server: access control against strangers and hostile pages, and the responses that the page gets."""

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from records import make_records
from stormtorch.telemetry.records import line_of
from stormtorch.watch.sources import FolderSource
from stormtorch.watch.watcher import Watcher
from stormtorch.watch.web import pages, server
from stormtorch.watch.web.access_guard import AccessGuard
from stormtorch.watch.web.server import listen, server_of


@dataclass
class Page:
    """A server that runs in a thread of the test."""

    guard: AccessGuard
    port: int

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def let_in(self, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        return self.get(path, Cookie=f"{self.guard.cookie}={self.guard.token}", **headers)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("run")
    for rank, records in make_records(3).items():
        (folder / f"rank-{rank}-0-{rank}.jsonl").write_text("".join(line_of(each) + "\n" for each in records))
    watcher = Watcher(FolderSource(folder))
    watcher.read()
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    guard = AccessGuard("127.0.0.1", port)
    running = server_of(watcher, guard)
    thread = threading.Thread(target=lambda: running.run(sockets=[listener]), daemon=True)
    thread.start()
    yield Page(guard, port)
    running.should_exit = True
    thread.join(10)


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_see(page: Page) -> None:
    status, headers, _ = page.get(f"/?token={page.guard.token}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"{page.guard.cookie}={page.guard.token};")
    assert "httponly" in cookie.lower()
    assert "samesite=lax" in cookie.lower()  # a link in a page of another site must open the page
    status, headers, _ = page.let_in(f"/?token={page.guard.token}")
    assert (status, headers["location"]) == (303, "/"), "the token must not stay in the address"
    status, _, text = page.let_in("/")
    assert status == 200
    assert "<title>stormtorch watch</title>" in text


@pytest.mark.parametrize("path", ["/", "/data", "/metrics", "/assets/main.js", "/nothing", "/?token=", "/?token=wrong"])
def test_a_stranger_gets_the_same_nothing_everywhere(page: Page, path: str) -> None:
    status, headers, text = page.get(path)
    assert status == 401
    assert text == "Open the address that `stormtorch watch` printed: it contains the token.\n"
    assert "set-cookie" not in headers
    assert page.get(path, Cookie=f"{page.guard.cookie}={page.guard.token[:-1]}x")[0] == 401
    assert page.get(path, Authorization="Bearer nonsense")[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "192.168.1.2"},
        {"Host": "["},
    ],
)
def test_a_hostile_page_gets_nothing_even_with_the_cookie(page: Page, headers: dict[str, str]) -> None:
    status, answer, text = page.let_in("/data", **headers)
    assert status == 403
    assert "ranks" not in text
    assert "access-control-allow-origin" not in answer


def test_the_page_itself_and_tunnels_to_it_get_everything(page: Page) -> None:
    own = f"127.0.0.1:{page.port}"
    for headers in ({"Host": own, "Origin": f"http://{own}"}, {"Host": "localhost:9999"}, {"Host": "[::1]:9999"}):
        assert page.let_in("/data", **headers)[0] == 200


def test_a_server_for_others_still_refuses_names_that_are_not_its_own() -> None:
    guard = AccessGuard("0.0.0.0", 80)
    assert guard.problem({"host": "192.168.1.2:80"}) is None
    assert guard.problem({"host": "evil.example"}) is not None


def test_a_server_for_others_answers_to_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1")
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.cluster.example")
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, ["login.cluster.example"], ["10.0.0.1"]))
    guard = AccessGuard("0.0.0.0", 80)
    for own in ("node1", "node1.cluster.example:80", "NODE1.cluster.example.", "login.cluster.example"):
        assert guard.problem({"host": own}) is None, own
    for other in ("evil.example", "node1.evil.example", "cluster.example", "node1.cluster.example.evil.example"):
        assert guard.problem({"host": other}) is not None, other
    assert AccessGuard("127.0.0.1", 80).problem({"host": "node1"}) is not None


def test_idle_connections_keep_nobody_out_and_are_closed(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IDLE_S", 1.0)
    with contextlib.ExitStack() as opened:
        idle = [opened.enter_context(socket.create_connection(("127.0.0.1", page.port), 10)) for _ in range(150)]
        for each in idle[::2]:
            with contextlib.suppress(ConnectionError):  # the oldest are closed already
                each.send(b"GET /data HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # the rest of the request never arrives
        assert page.let_in("/data")[0] == 200
        for each in idle:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1000) == b""
    assert page.let_in("/data")[0] == 200


def test_every_answer_forbids_framing_foreign_scripts_and_caching(page: Page) -> None:
    for status, headers, _ in (page.let_in("/"), page.get("/"), page.let_in("/data"), page.let_in("/", Origin="null")):
        assert status in (200, 401, 403)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_the_data_is_the_state_and_only_new_bins_travel_again(page: Page) -> None:
    _, headers, text = page.let_in("/data")
    data = json.loads(text)
    assert headers["content-type"] == "application/json"
    assert [each["rank"] for each in data["ranks"]] == [0, 1, 2]
    assert len(data["series"]["columns"]["time"]) == 20
    again = json.loads(page.let_in(f"/data?since=18&width={data['series']['width_s']}")[2])
    assert len(again["series"]["columns"]["time"]) == 2
    for nonsense in ("since=-1&width=x", "since=99999999999&width=nan", "since=%F0%9F%98%80"):
        assert page.let_in(f"/data?{nonsense}")[0] == 200


def test_only_files_of_the_page_are_served(page: Page) -> None:
    assert page.let_in("/assets/main.js")[1]["content-type"].startswith("text/javascript")
    assert page.let_in("/assets/uPlot.iife.min.js")[0] == 200
    for path in (
        "/assets/..%2f..%2fpages.py",
        "/assets/index.html",
        "/assets/",
        "/etc/passwd",
        "/assets/%2e%2e/guard.py",
    ):
        assert page.let_in(path)[0] == 404
    assert page.get("/data", method="POST", Cookie=f"{page.guard.cookie}={page.guard.token}")[0] == 405


def test_metrics_come_by_header_or_token(page: Page) -> None:
    for path, headers in (
        ("/metrics", {"Authorization": f"Bearer {page.guard.token}"}),
        (f"/metrics?token={page.guard.token}", {}),
    ):
        status, answer, text = page.get(path, **headers)
        assert status == 200
        assert answer["content-type"].startswith("text/plain; version=0.0.4")
        assert re.search(r'^stormtorch_\w+\{[^}]*rank="2"', text, re.M)


@pytest.mark.pure
def test_a_report_holds_its_data_and_loads_nothing(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--"
    text = pages.report({"notes": [{"text": hostile}]})
    assert hostile not in text
    assert json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0]) == {"notes": [{"text": hostile}]}
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    assert "import {" not in text
    assert "default-src 'none'" in text
