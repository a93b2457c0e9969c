"""Command-line options shared by commands, each declared once: name, help text, and panel of --help."""

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

Ranks = Annotated[
    int, typer.Option(help="Processes of this machine, or hosts of a lab with one process each: 2 to 64.")
]
Workers = Annotated[int, typer.Option(help="Simulated ranks, each with its own replica: 2 to 8,192.")]
Hosts = Annotated[int, typer.Option(help="Virtual hosts: 2 to 64.")]
Steps = Annotated[int, typer.Option(help="Optimizer steps of each training.")]
Seeds = Annotated[
    int, typer.Option(help="Trainings of each policy; each seed has its own weights, batches and packet loss.")
]
FirstSeed = Annotated[int, typer.Option(help="First seed; the others follow it.")]
Seed = Annotated[int, typer.Option(help="Random seed of the loss; the same seed drops the same packets.")]
Timeout = Annotated[float, typer.Option(help="Time limit of the whole command, in seconds.")]
WaitLimit = Annotated[
    float,
    typer.Option(
        help="Abort a call over TCP after so many seconds; a backend that has used as many skips the other rounds.",
        rich_help_panel=_LAB,
    ),
]

# --- results ----------------------------------------------------------------------------------------------------------

Ledger = Annotated[Path | None, typer.Option(help="Write one line of JSON per step to this file.", dir_okay=False)]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Save checkpoints and results in this folder; repeating the command resumes from them.",
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
        help="Fraction of each lossy message that may be missing: 1 never retransmits.",
        rich_help_panel=_POLICY,
    ),
]
GradientBudget = Annotated[
    float | None,
    typer.Option(
        help="plain and lead: the budget of messages of gradients.",
        show_default="that of --budget",
        rich_help_panel=_POLICY,
    ),
]
Lead = Annotated[
    float,
    typer.Option(
        help="lead: how far parameters are extrapolated, in multiples of their mean lag p/(1-p).",
        rich_help_panel=_POLICY,
    ),
]
ShardsName = Annotated[
    ShardSizes,
    typer.Option(
        "--shards",
        help="Size of each rank's shard: equal, or by the measured speed of its link and its processor.",
        rich_help_panel=_POLICY,
    ),
]
WeightsName = Annotated[
    Weights,
    typer.Option(
        "--weights",
        help="plain and lead: average the gradients received, or weigh each by the inverse of its arrival probability.",
        rich_help_panel=_POLICY,
    ),
]
RedundancyText = Annotated[
    str,
    typer.Option(
        "--redundancy",
        help="plain and lead: parity chunks per data chunk (forward error correction), which recover lost ones; "
        "auto: chosen by the loss and the width of --wire.",
        autocompletion=complete_choice("auto,0.25,0.5,1"),
        rich_help_panel=_POLICY,
    ),
]
_MAX_LAG = typer.Option(
    help="plain and lead: largest age of a copy in steps before it is fetched exactly.",
    show_default="no bound",
    rich_help_panel=_POLICY,
)
MaxLag = Annotated[int | None, _MAX_LAG]
Every = Annotated[
    int,
    typer.Option(
        help="Steps between two exchanges of models, for policies that exchange models.", rich_help_panel=_POLICY
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set any other field of the policies that have it, such as outer_lr=1; can be given several times.",
        show_default=False,
        rich_help_panel=_POLICY,
    ),
]

# --- the network: injected or simulated loss --------------------------------------------------------------------------

_LOSS_HELP = "Fraction of the datagrams to drop on every link: 0 to 0.9"
Loss = Annotated[float, typer.Option(help=f"{_LOSS_HELP}.", rich_help_panel=_NETWORK)]
LossBesideLinks = Annotated[
    float | None,
    typer.Option(
        "--loss",
        help=f"{_LOSS_HELP}; with --per-link, on every link not in the file.",
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
        help="JSON lines of recorded links: each link replays a random one of those with 0.5 to 30 % loss.",
        dir_okay=False,
        rich_help_panel=_NETWORK,
    ),
]
Shared = Annotated[
    float | None,
    typer.Option(
        help="Fraction of the loss on the sender's uplink, where all receivers lose the same chunk: 0 to 1.",
        rich_help_panel=_NETWORK,
    ),
]
Stragglers = Annotated[
    float | None,
    typer.Option(
        help="Probability that a worker is late in an exchange, so that only a fraction of its messages counts.",
        rich_help_panel=_NETWORK,
    ),
]
Delivered = Annotated[
    float | None,
    typer.Option(
        help="Fraction of a late worker's messages that counts.",
        show_default="random each time",
        rich_help_panel=_NETWORK,
    ),
]

# --- the network of a lab: real packets -------------------------------------------------------------------------------

InLab = Annotated[
    bool,
    typer.Option(
        "--lab", help="Drop real packets between virtual hosts; needs root or user namespaces.", rich_help_panel=_LAB
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        help="Rate of each host's access link, both ways: 400mbit, 1gbit, unlimited.",
        autocompletion=complete_choice("20mbit,100mbit,400mbit,1gbit,unlimited"),
        rich_help_panel=_LAB,
    ),
]
LabLoss = Annotated[
    float | None,
    typer.Option(
        "--loss", help="Fraction of all packets to drop on every link, TCP's included: 0 to 1.", rich_help_panel=_LAB
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
    typer.Option(help="One-way delay between hosts: 20ms is a round trip of 40 ms.", rich_help_panel=_LAB),
]
Jitter = Annotated[
    str | None,
    typer.Option(help="Largest additional delay, drawn for each packet; packets stay in order.", rich_help_panel=_LAB),
]
Queue = Annotated[
    str | None,
    typer.Option(
        help="Bytes of the queue at each end of an access link: 64kb, 1mb; 512kb at first.", rich_help_panel=_LAB
    ),
]
LowShare = Annotated[
    float | None,
    typer.Option(
        help="Share of a link that packets of low priority (DSCP 1 or 8) keep while others could use all of it: "
        "0 to 1. They may always use free capacity.",
        show_default="all packets alike",
        rich_help_panel=_LAB,
    ),
]
LowQueue = Annotated[
    str | None,
    typer.Option(
        help="Bytes of the low-priority queue at each end of an access link; 128kb at first.", rich_help_panel=_LAB
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
        help="Connect two hosts by a cable of this MTU, without switch or limits: 1500, or 9000 for jumbo frames.",
        rich_help_panel=_LAB,
    ),
]
Nat = Annotated[
    list[str] | None,
    typer.Option(
        help="Put a host behind a NAT router: 1, or 1:symmetric for another port per destination; can be given "
        "several times.",
        rich_help_panel=_LAB,
    ),
]
LabName = Annotated[str | None, typer.Option("--lab", help="Name of the lab, if several are running.")]

# --- the model --------------------------------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Option(
        help=f"Model to train: one of {spaced(MODELS)}.", autocompletion=complete_choice(MODELS), rich_help_panel=_MODEL
    ),
]
_DATA_HELP = "File or folder of the training data"
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
# Commands with one model have its defaults; `simulate` passes None for those of the chosen model.
_BATCH = typer.Option(help="Examples of each rank per step.", rich_help_panel=_MODEL)
_LR = typer.Option(help="Highest learning rate; warm-up, then cosine decay.", rich_help_panel=_MODEL)
_CONTEXT = typer.Option(help="Language models: tokens or bytes per example.", rich_help_panel=_MODEL)
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
    Device, typer.Option("--device", help="Device; auto uses a GPU if there is one.", rich_help_panel=_SPEED)
]
PrecisionName = Annotated[
    Precision,
    typer.Option("--precision", help="Number format in which matrices are multiplied.", rich_help_panel=_SPEED),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        help="Number of workers computed at a time.", show_default="as many as fit into memory", rich_help_panel=_SPEED
    ),
]
HowName = Annotated[
    How,
    typer.Option(
        "--how",
        help="Compute these workers together by torch.func.vmap, or one after the other; auto tests what works.",
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
        help="Deterministic GPU computation: the same seed, GPU and versions give the same bits.",
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
        help=f"{_BACKENDS_HELP}. A lab also has gloo-bbr and gloo-cubic, named by TCP's congestion control; one "
        "host also has mpi, in `allreduce` and `latency`, if installed.",
        show_default="all; in a lab gloo-bbr and gloo-cubic in place of gloo",
        autocompletion=complete_choice_list(DDP_BACKENDS, LAB_DDP_BACKENDS),
    ),
]
Learners = Annotated[
    str | None,
    typer.Option(
        "--backends",
        help=f"{_BACKENDS_HELP}: any of `bench ddp`, and policies by name, such as diloco.",
        show_default="gloo (in a lab gloo-bbr) and storm-drift",
        autocompletion=complete_choice_list(DDP_BACKENDS, LAB_DDP_BACKENDS, NAMED_POLICIES),
    ),
]
Wires = Annotated[
    str,
    typer.Option(
        "--wire",
        help=f"Number formats that storm-lossy and storm-drift send, {_LIST}: {spaced(WIRES)}; measured one by one.",
        autocompletion=complete_choice_list(WIRES),
    ),
]
Iters = Annotated[int, typer.Option(help="Timed rounds per size and network.")]
_WARMUP_HELP = "Untimed rounds before them; their results are checked."
Warmup = Annotated[int, typer.Option(help=_WARMUP_HELP)]
WarmupAnywhere = Annotated[
    int | None, typer.Option("--warmup", help=_WARMUP_HELP, show_default=f"{WARMUP}; in a lab {LAB_WARMUP}")
]
