"""Files of links."""

import json
from pathlib import Path

import pytest

from stormtorch.network.link_file import read_links
from stormtorch.network.loss import Bernoulli, GilbertElliott, LinkModel, PerLink, Trace

pytestmark = pytest.mark.pure


def test_links_are_read_from_the_file_that_the_lab_reads(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"bits": "0"}\n{"bits": "0011"}\n')
    entries = [
        {"from": "*", "to": 2, "loss": 0.5},
        {"from": 0, "to": 2, "loss": 0.2, "burst": 8},
        {"from": 1, "to": 0, "trace": {"file": "traces.jsonl", "line": 1}},
        {"from": 2, "to": "*", "delay": "80ms"},
    ]
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"links": entries, "hosts": [{"host": 1, "rate": "10mbit"}]}))
    links: dict[tuple[int, int], LinkModel] = {
        (1, 2): Bernoulli(p=0.5),
        (0, 2): GilbertElliott(p=0.2, burst=8),
        (1, 0): Trace(bits="0011"),
    }
    assert read_links(path, 3) == PerLink(links=links)
    assert read_links(str(path), 3, default=Bernoulli(p=0.1)) == PerLink(default=Bernoulli(p=0.1), links=links)
    for world, change, message in (
        (2, {}, r"^links\[0\].to must .* 0 to 1, got 2"),
        (3, {"loss": 0.9, "burst": 2}, r"^links\[4\]: burst 2.0 is too short"),
        (3, {"trace": {}}, r"^links\[4\]: trace must name a 'file'"),
        (3, {"los": 1}, r"^links\[4\] has los"),
    ):
        path.write_text(json.dumps({"links": [*entries, {"from": 0, "to": 1, **change}]}))
        with pytest.raises(ValueError, match=message):
            read_links(path, world)
    with pytest.raises(ValueError, match=r"^cannot be read"):
        read_links(tmp_path / "none", 3)
