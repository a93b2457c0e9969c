"""The network lab: virtual hosts on this machine, joined by a real network with packet loss, delay and queues.

from stormtorch_lab.netns import Lab

with Lab(hosts=4, rate="400mbit", loss=0.1) as lab:
    statuses = lab.run(["python", "train.py"])
"""

from stormtorch.checks import BadCondition
from stormtorch_lab.netns.access import LabError, LabUnavailable
from stormtorch_lab.netns.conditions import AccessLink, Conditions, between, both_ways
from stormtorch_lab.netns.lab import Lab
from stormtorch_lab.netns.measured import AccessLinkCount, LinkCount, Measured
from stormtorch_lab.netns.per_link import read_per_link

__all__ = [
    "AccessLink",
    "AccessLinkCount",
    "BadCondition",
    "Conditions",
    "Lab",
    "LabError",
    "LabUnavailable",
    "LinkCount",
    "Measured",
    "between",
    "both_ways",
    "read_per_link",
]
