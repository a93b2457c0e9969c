"""etcd as the rendezvous store: ranks use a real one."""

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import OPTIONS
from torch.distributed import DistStoreError

from stormtorch import EtcdStore, connect
from stormtorch.collectives import Group, all_reduce


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real etcd on loopback."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        peers = f"http://127.0.0.1:{free_port()}"
        here = f"http://{self.address}"
        self._process = subprocess.Popen(
            ["etcd", "--data-dir", str(folder), "--listen-client-urls", here, "--advertise-client-urls", here,
             "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
             "--initial-cluster", f"default={peers}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        give_up_at = time.monotonic() + 20.0
        while True:
            try:
                self.store("up").check(["x"])
                return
            except RuntimeError:
                assert time.monotonic() < give_up_at, "etcd does not answer"
                assert self._process.poll() is None, "etcd has ended"
                time.sleep(0.05)

    def store(self, prefix: str, timeout_s: float = 20.0) -> EtcdStore:
        return EtcdStore(f"127.0.0.1:1,{self.address}", prefix, timeout_s=timeout_s)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        yield server
        server.end()


def test_values_are_written_and_read(server: Server) -> None:
    store = server.store("values")
    store.set("text", "ünder")
    store.set("bytes", bytes(range(256)))
    store.set("nothing", "")
    assert store.get("text").decode() == "ünder"
    assert store.get("bytes") == bytes(range(256))
    assert store.get("nothing") == b""
    assert store.check(["text", "bytes"])
    assert not store.check(["text", "other"])
    assert store.check(["text"] * 300)
    assert store.num_keys() == 3
    assert store.delete_key("text")
    assert not store.delete_key("text")
    assert not store.check(["text"])
    assert not server.store("elsewhere").check(["bytes"])


def test_numbers_are_added_by_many_at_once(server: Server) -> None:
    store = server.store("numbers")
    sums: list[int] = []

    def add() -> None:
        sums.extend(server.store("numbers").add("count", 1) for _ in range(5))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == list(range(1, 21))
    assert store.add("count", 0) == 20
    assert store.get("count") == b"20"


def test_a_value_is_replaced_only_if_it_is_the_expected_one(server: Server) -> None:
    store = server.store("compared")
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"


def test_a_key_is_waited_for(server: Server) -> None:
    store = server.store("waiting")
    later = threading.Timer(0.3, lambda: server.store("waiting").set("key", "here"))
    later.start()
    assert store.get("key") == b"here"
    with pytest.raises(DistStoreError, match=r"no keys \['never'\] within 0.2 s"):
        store.wait(["never"], timedelta(seconds=0.2))


def test_ranks_meet_in_it(server: Server) -> None:
    sums: list[float] = []

    def work(rank: int) -> None:
        with connect(server.store("job"), rank, 3, OPTIONS) as transport:
            tensor = torch.full((1000,), rank + 1.0)
            all_reduce(Group(transport), tensor).wait()
            sums.append(tensor[0].item())

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sums == [6.0] * 3


def test_a_process_group_meets_in_it(server: Server) -> None:
    """torch wraps the store in prefixes of its own."""
    dist.init_process_group("storm", store=server.store("group"), rank=0, world_size=1, pg_options=OPTIONS)
    try:
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert tensor.sum() == 10
    finally:
        dist.destroy_process_group()


def test_a_server_that_is_gone_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"etcd does not answer: 127\.0\.0\.1:1: .*refused"):
        EtcdStore("127.0.0.1:1").set("key", "value")
    with pytest.raises(ValueError, match="addresses of etcd must be"):
        EtcdStore("ftp://host")
