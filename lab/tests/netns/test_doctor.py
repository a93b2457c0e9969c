"""The doctor in labs with known faults: it must diagnose all of them, and nothing without faults."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from commands import call
from doctor_lab import DOCTOR, block_udp, examine, narrow_link, reach, slow_link, translate
from stormtorch.network.link_file import read_links
from stormtorch.network.loss import Bernoulli, LinkModel, PerLink, Trace
from stormtorch_lab.netns import Conditions, Lab, read_per_link

pytestmark = pytest.mark.lab


def bad_host(host: int, hosts: int, loss: float) -> PerLink:
    model: LinkModel = Bernoulli(p=loss)
    return PerLink(
        links={link: model for other in range(hosts) if other != host for link in ((host, other), (other, host))}
    )


def names(hosts: int) -> list[str]:
    return [f"h{host}" for host in range(hosts)]


@pytest.mark.thorough
def test_a_healthy_lab_has_no_problem(lab: Callable[..., Lab], tmp_path: Path) -> None:
    network = lab(hosts=3, rate="100mbit", probe=False)
    found = examine(reach(network, tmp_path), names(3), "--seconds", "4.5")
    assert (found.code, found.problems()) == (0, []), found.text
    links = found.report["measured"]["links"]
    assert len(links) == 6
    for link in links:
        assert link["loss"] == 0.0
        assert link["rate_bits_per_s"] == pytest.approx(100e6, rel=0.2)
        assert link["path_mtu"] == 1500


@pytest.mark.thorough
def test_a_machine_tells_of_its_own_interface(lab: Callable[..., Lab]) -> None:
    network = lab(hosts=2, probe=False)
    network.holders[1].run(["ip", "link", "set", "eth0", "mtu", "1200"])
    done = network.start(1, [*DOCTOR], stdout=subprocess.PIPE, text=True)
    text, _ = done.communicate(timeout=60)
    assert done.returncode == 0
    assert "MTU 1200, 10 Gbit/s, full duplex: the MTU is small" in text


@pytest.mark.thorough
def test_a_bad_host_is_named_and_its_losses_are_kept_for_replay(lab: Callable[..., Lab], tmp_path: Path) -> None:
    network = lab(hosts=3, rate="100mbit", loss=bad_host(2, 3, 0.2), seed=3, probe=False)
    kept = tmp_path / "links.json"
    found = examine(reach(network, tmp_path), names(3), "--seconds", "6", "--capture", str(kept))
    assert (found.code, found.problems()) == (1, [("loss", (2,))]), found.text
    assert "the fault is at h2" in found.text
    # The lab's loss counters cover mostly these packets.
    lost = {(link.source, link.target): link.lost / link.seen for link in network.measured().links}
    links = read_links(kept, 3)
    for link in ((0, 2), (2, 0), (1, 2), (2, 1)):
        model = links.model(*link)
        assert isinstance(model, Trace)
        assert sum(model.bits) / len(model.bits) == pytest.approx(lost[link], abs=0.03)
    assert links.model(0, 1) == Bernoulli(p=0.0)


@pytest.mark.slow
def test_the_doctor_finds_five_faults_at_once(lab: Callable[..., Lab], tmp_path: Path) -> None:
    network = lab(hosts=6, rate="100mbit", loss=bad_host(1, 6, 0.1), seed=1, probe=False)
    block_udp(network, 2)
    narrow_link(network, 3, 4, 1280)
    slow_link(network, 0, 4, "5mbit")
    ssh = reach(network, tmp_path, {5: "--receive-buffer-bytes 8192"})
    found = examine(ssh, names(6), "--seconds", "17.5")
    assert found.code == 1
    assert found.problems() == [
        ("UDP blocked", (2,)),
        ("loss", (1,)),
        ("path MTU", (3, 4)),
        ("slow", (0, 4)),
        ("receive buffer", (5,)),
    ], found.text
    texts = " ".join(each["text"] for each in found.report["findings"])
    assert "no packets above 1280 bytes" in texts and "carries only 5" in texts


@pytest.mark.slow
def test_a_blocked_port_and_a_translated_address_are_named(lab: Callable[..., Lab], tmp_path: Path) -> None:
    network = lab(hosts=3, rate="100mbit", probe=False)
    block_udp(network, 2, port=29500)
    translate(network, 1, "198.18.0.200")
    found = examine(reach(network, tmp_path), names(3), "--seconds", "3", "--port", "29500")
    assert found.problems() == [("UDP blocked", (2,))], found.text
    assert ("NAT", [1]) in [(each["subject"], each["ranks"]) for each in found.report["findings"]]
    assert "UDP to port 29500 of h2 is blocked, but TCP gets through" in found.text
    assert "others see 198.18.0.200" in found.text


@pytest.mark.slow
def test_a_capture_replays_in_the_lab_and_in_the_simulator(lab: Callable[..., Lab], tmp_path: Path) -> None:
    network = lab(hosts=2, loss=0.15, burst=4, seed=5, probe=False)
    kept = tmp_path / "links.json"
    first = examine(reach(network, tmp_path), names(2), "--seconds", "4", "--capture", str(kept))
    replayed = lab(2, read_per_link(kept, Conditions(seed=9), 2), probe=False)
    second = examine(reach(replayed, tmp_path), names(2), "--seconds", "4")
    for before, after in zip(first.report["measured"]["links"], second.report["measured"]["links"], strict=True):
        assert before["loss"] == pytest.approx(0.15, abs=0.06)  # it varies with the bursts
        assert after["loss"] == pytest.approx(before["loss"], abs=0.03)
        assert after["burst"] == pytest.approx(before["burst"], rel=0.2)
    out = tmp_path / "simulated.json"
    options = ("--workers", "2", "--steps", "6", "--policy", "plain", "--per-link", str(kept), "--json", str(out))
    code, text = call("simulate", *options)
    assert code == 0, text
    expected = mean([link["loss"] for link in first.report["measured"]["links"]])
    assert json.loads(out.read_text())["measured"]["loss"] == pytest.approx(expected, abs=0.05)
