"""Options of the commands, each declared once: what it is called, what it means, in which panel --help shows it."""

from pathlib import Path
from typing import Annotated

import typer

from stormtorch.cli.terminal.completion import complete_choice, complete_choice_list
from stormtorch_lab.cli.terminal.choices import (
    DDP_BACKENDS,
    LAB_BACKENDS,
    LAB_DDP_BACKENDS,
    LAB_WARMUP,
    MODELS,
    NAMED_POLICIES,
    POLICIES,
    WARMUP,
    WIRES,
    Device,
    How,
    Optimizer,
    Precision,
    ShardSizes,
    Weights,
    Wire,
    spaced,
)

_NETWORK, _LAB, _POLICY = "The network", "A lab's network", "Policies"
_MODEL, _SPEED = "The model", "How it is computed"
_LIST = "separated by commas"

# --- who takes part, and for how long ---------------------------------------------------------------------------------

Ranks = Annotated[int, typer.Option(help="Processes of this machine, or in a lab hosts with one each: 2 to 64.")]
Workers = Annotated[int, typer.Option(help="Simulated ranks, each with a replica of its own: 2 to 8,192.")]
Hosts = Annotated[int, typer.Option(help="Virtual hosts: 2 to 64.")]
Steps = Annotated[int, typer.Option(help="Optimizer steps of each training.")]
Seeds = Annotated[
    int, typer.Option(help="Trainings of each policy; each seed has weights, batches and loss of its own.")
]
FirstSeed = Annotated[int, typer.Option(help="First of the seeds; the others follow.")]
Seed = Annotated[int, typer.Option(help="Seed of the loss: the same packets of each link are lost again.")]
Timeout = Annotated[float, typer.Option(help="Give up after so many seconds in all.")]
WaitLimit = Annotated[
    float,
    typer.Option(
        help="Give up a call over TCP after so many seconds; a backend that has used as many skips the other rounds.",
        rich_help_panel=_LAB,
    ),
]

# --- results ----------------------------------------------------------------------------------------------------------

Ledger = Annotated[Path | None, typer.Option(help="Write a line of JSON for every step to this file.", dir_okay=False)]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Keep states and results in this folder: the same command again goes on where it stopped.",
        file_okay=False,
    ),
]

# --- policies ---------------------------------------------------------------------------------------------------------

PolicyNames = Annotated[
    str,
    typer.Option(
        "--policy",
        help=f"Policies to compare, {_LIST}: {spaced(POLICIES)}; or classes in files, as my.py:MyPolicy.",
        autocompletion=complete_choice_list(POLICIES),
        rich_help_panel=_POLICY,
    ),
]
WireName = Annotated[
    Wire,
    typer.Option("--wire", help="Number format on the network.", rich_help_panel=_POLICY),
]
Budget = Annotated[
    float,
    typer.Option(
        help="Fraction of each lossy message that may be missing: 1 never sends anything again.",
        rich_help_panel=_POLICY,
    ),
]
GradientBudget = Annotated[
    float | None,
    typer.Option(
        help="plain and lead: that fraction for messages of gradients.",
        show_default="that of --budget",
        rich_help_panel=_POLICY,
    ),
]
Lead = Annotated[
    float,
    typer.Option(
        help="lead: how far ahead parameters are sent, in multiples of their mean lag p/(1-p).",
        rich_help_panel=_POLICY,
    ),
]
ShardsName = Annotated[
    ShardSizes,
    typer.Option(
        "--shards",
        help="How much each rank owns: the same, or by what its line and its processor are measured to carry.",
        rich_help_panel=_POLICY,
    ),
]
WeightsName = Annotated[
    Weights,
    typer.Option(
        "--weights",
        help="plain and lead: average gradients that arrived, or weigh each by the inverse of its chance to arrive.",
        rich_help_panel=_POLICY,
    ),
]
RedundancyText = Annotated[
    str,
    typer.Option(
        "--redundancy",
        help="plain and lead: parity chunks for each data chunk, which bring lost ones back; auto: as much as the "
        "loss calls for and a narrow --wire pays for.",
        autocompletion=complete_choice("auto,0.25,0.5,1"),
        rich_help_panel=_POLICY,
    ),
]
_MAX_LAG = typer.Option(
    help="plain and lead: steps that a parameter may be out of date before it is fetched exactly.",
    show_default="no bound",
    rich_help_panel=_POLICY,
)
MaxLag = Annotated[int | None, _MAX_LAG]
Every = Annotated[
    int,
    typer.Option(help="Steps between two exchanges of models, where a policy has such.", rich_help_panel=_POLICY),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set any other field of the policies that have it, as outer_lr=1; may be given several times.",
        show_default=False,
        rich_help_panel=_POLICY,
    ),
]

# --- the network: injected or simulated loss --------------------------------------------------------------------------

_LOSS_HELP = "Fraction of the datagrams to lose on every link: 0 to 0.9"
Loss = Annotated[float, typer.Option(help=f"{_LOSS_HELP}.", rich_help_panel=_NETWORK)]
LossBesideLinks = Annotated[
    float | None,
    typer.Option(
        "--loss",
        help=f"{_LOSS_HELP}; with --per-link, on every link that the file does not name.",
        show_default="0.1, or 0 with --per-link",
        rich_help_panel=_NETWORK,
    ),
]
_IN_PACKETS_HELP = "Mean length of a run of losses, in packets (Gilbert-Elliott)"
BurstInPackets = Annotated[str, typer.Option("--burst", help=f"{_IN_PACKETS_HELP}.", rich_help_panel=_NETWORK)]
_BURST_HELP = f"{_IN_PACKETS_HELP} or in time: 20, 5ms."
Burst = Annotated[str, typer.Option(help=_BURST_HELP, rich_help_panel=_NETWORK)]
PerLink = Annotated[
    Path | None,
    typer.Option(
        help="JSON file of links, in a lab also of hosts, that differ from the others: see docs/faults.md.",
        dir_okay=False,
        rich_help_panel=_NETWORK,
    ),
]
TraceDrawn = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="JSON lines of recorded links: each link replays one, drawn from those that lose 0.5 to 30 %.",
        dir_okay=False,
        rich_help_panel=_NETWORK,
    ),
]
Shared = Annotated[
    float | None,
    typer.Option(
        help="Fraction of the loss on a sender's way out, where all receivers lose the same chunk: 0 to 1.",
        rich_help_panel=_NETWORK,
    ),
]
Stragglers = Annotated[
    float | None,
    typer.Option(
        help="Chance that a worker is late in an exchange, so that only a fraction of its messages counts.",
        rich_help_panel=_NETWORK,
    ),
]
Delivered = Annotated[
    float | None,
    typer.Option(
        help="Fraction of a late worker's messages that still counts.",
        show_default="drawn each time",
        rich_help_panel=_NETWORK,
    ),
]

# --- the network of a lab: real packets -------------------------------------------------------------------------------

InLab = Annotated[
    bool,
    typer.Option(
        "--lab", help="Lose real packets between virtual hosts; needs root or user namespaces.", rich_help_panel=_LAB
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        help="Rate of each host's line, both ways: 400mbit, 1gbit, unlimited.",
        autocompletion=complete_choice("20mbit,100mbit,400mbit,1gbit,unlimited"),
        rich_help_panel=_LAB,
    ),
]
LabLoss = Annotated[
    float | None,
    typer.Option(
        "--loss", help="Fraction of all packets to lose on every link, TCP's as well: 0 to 1.", rich_help_panel=_LAB
    ),
]
LabBurst = Annotated[str | None, typer.Option("--burst", help=_BURST_HELP, rich_help_panel=_LAB)]
Trace = Annotated[
    str | None,
    typer.Option(
        help="Replay losses on every link: FILE or FILE:LINE of JSON lines with 'bits', 1 is lost.",
        rich_help_panel=_LAB,
    ),
]
Delay = Annotated[
    str | None,
    typer.Option(help="Delay from host to host, one way: 20ms is 40 ms for the round trip.", rich_help_panel=_LAB),
]
Jitter = Annotated[
    str | None,
    typer.Option(help="Largest additional delay, drawn for each packet; packets stay in order.", rich_help_panel=_LAB),
]
Queue = Annotated[
    str | None,
    typer.Option(help="Bytes that may wait at each end of a line: 64kb, 1mb; 512kb at first.", rich_help_panel=_LAB),
]
LowShare = Annotated[
    float | None,
    typer.Option(
        help="Share of a line that packets of low priority (DSCP 1 or 8) have while others want it all: 0 to 1. They "
        "may always use what is free.",
        show_default="all packets alike",
        rich_help_panel=_LAB,
    ),
]
LowQueue = Annotated[
    str | None,
    typer.Option(
        help="Bytes of low priority that may wait at each end of a line; 128kb at first.", rich_help_panel=_LAB
    ),
]
Tcp = Annotated[
    str | None,
    typer.Option(
        help="Congestion control of TCP on the hosts: bbr, cubic, ...",
        autocompletion=complete_choice("bbr,cubic,reno"),
        show_default="this machine's",
        rich_help_panel=_LAB,
    ),
]
Cable = Annotated[
    int | None,
    typer.Option(
        help="Join two hosts by a cable of this MTU, without switch or limits: 1500, or 9000 for jumbo frames.",
        rich_help_panel=_LAB,
    ),
]
Nat = Annotated[
    list[str] | None,
    typer.Option(
        help="Put a host behind a router that translates addresses, as in a home: 1, or 1:symmetric for one that shows "
        "another port to each destination; can be given several times.",
        rich_help_panel=_LAB,
    ),
]
LabName = Annotated[str | None, typer.Option("--lab", help="Name of the lab, if several run.")]

# --- the model --------------------------------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Option(
        help=f"Model to train: one of {spaced(MODELS)}.", autocompletion=complete_choice(MODELS), rich_help_panel=_MODEL
    ),
]
_DATA_HELP = "File or folder to learn from"
TextData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help=f"{_DATA_HELP}: a text, or WikiText-2's folder.",
        show_default="the source of Python's standard library",
        rich_help_panel=_MODEL,
    ),
]
PictureData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help=f"{_DATA_HELP}: CIFAR-10's, with data_batch_1 to 5 and test_batch, or with cifar-10-batches-py.",
        show_default="scikit-learn's digits, 8 x 8",
        rich_help_panel=_MODEL,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help=f"{_DATA_HELP}: a text or WikiText-2, CIFAR-10, ATIS; see docs/simulate.md.",
        show_default="llama: Python's standard library; resnet: scikit-learn's digits",
        rich_help_panel=_MODEL,
    ),
]
# Commands with one model know its defaults; `simulate` leaves them to the model, by None.
_BATCH = typer.Option(help="Examples of each rank in a step.", rich_help_panel=_MODEL)
_LR = typer.Option(help="Highest learning rate; it rises first and then falls as a cosine.", rich_help_panel=_MODEL)
_CONTEXT = typer.Option(help="Language models: tokens, or bytes, of an example.", rich_help_panel=_MODEL)
_LAYERS = typer.Option(help="LLaMA: number of layers.", rich_help_panel=_MODEL)
_WIDTH = typer.Option(
    help="LLaMA: width, a multiple of 16; 2 layers of 64 have 0.12 M parameters.", rich_help_panel=_MODEL
)
Batch = Annotated[int, _BATCH]
OwnBatch = Annotated[int | None, _BATCH]
Lr = Annotated[float, _LR]
OwnLr = Annotated[float | None, _LR]
Context = Annotated[int, _CONTEXT]
OwnContext = Annotated[int | None, _CONTEXT]
Layers = Annotated[int, _LAYERS]
OwnLayers = Annotated[int | None, _LAYERS]
Width = Annotated[int, _WIDTH]
OwnWidth = Annotated[int | None, _WIDTH]
OptimizerName = Annotated[
    Optimizer,
    typer.Option(
        "--optimizer", help="Optimizer: the model's own, or another; sgd has no momentum.", rich_help_panel=_MODEL
    ),
]

# --- how a simulation is computed -------------------------------------------------------------------------------------

DeviceName = Annotated[
    Device, typer.Option("--device", help="Device; auto takes a GPU if there is one.", rich_help_panel=_SPEED)
]
PrecisionName = Annotated[
    Precision,
    typer.Option("--precision", help="Number format in which matrices are multiplied.", rich_help_panel=_SPEED),
]
AtOnce = Annotated[
    int | None,
    typer.Option(help="Workers computed at a time.", show_default="as many as fit into memory", rich_help_panel=_SPEED),
]
HowName = Annotated[
    How,
    typer.Option(
        "--how",
        help="Compute those workers together by torch.func.vmap, or one after the other; auto finds out.",
        rich_help_panel=_SPEED,
    ),
]
Fuse = Annotated[
    bool,
    typer.Option("--fuse", help="Let torch.compile fuse kernels: slow at first, then faster.", rich_help_panel=_SPEED),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Have a GPU compute the same bits every time: the same seed, GPU and versions give the same results.",
        rich_help_panel=_SPEED,
    ),
]

# --- benchmarks -------------------------------------------------------------------------------------------------------

_BACKENDS_HELP = f"Backends to compare, {_LIST}"
Backends = Annotated[
    str, typer.Option(help=f"{_BACKENDS_HELP}.", autocompletion=complete_choice_list(LAB_BACKENDS, "gloo"))
]
BackendsAnywhere = Annotated[
    str | None,
    typer.Option(
        "--backends",
        help=f"{_BACKENDS_HELP}. A lab also has gloo-bbr and gloo-cubic, by TCP's congestion control; one host also "
        "has mpi, in `allreduce` and `latency`, where it is installed.",
        show_default="all; in a lab gloo-bbr and gloo-cubic in place of gloo",
        autocompletion=complete_choice_list(DDP_BACKENDS, LAB_DDP_BACKENDS),
    ),
]
Learners = Annotated[
    str | None,
    typer.Option(
        "--backends",
        help=f"{_BACKENDS_HELP}: any of `bench ddp`, and policies by name, as diloco.",
        show_default="gloo (in a lab gloo-bbr) and storm-drift",
        autocompletion=complete_choice_list(DDP_BACKENDS, LAB_DDP_BACKENDS, NAMED_POLICIES),
    ),
]
Wires = Annotated[
    str,
    typer.Option(
        "--wire",
        help=f"Number formats that storm-lossy and storm-drift send, {_LIST}: {spaced(WIRES)}; each is measured.",
        autocompletion=complete_choice_list(WIRES),
    ),
]
Iters = Annotated[int, typer.Option(help="Timed rounds, of each size and of each network.")]
_WARMUP_HELP = "Rounds before the timed ones; their results are checked."
Warmup = Annotated[int, typer.Option(help=_WARMUP_HELP)]
WarmupAnywhere = Annotated[
    int | None, typer.Option("--warmup", help=_WARMUP_HELP, show_default=f"{WARMUP}; in a lab {LAB_WARMUP}")
]
