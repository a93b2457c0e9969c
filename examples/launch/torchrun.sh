#!/bin/sh
# Runs one rank under a torchrun of its own, which starts it again when it dies and leaves all others alone.
#
#     STORE=tcp://host:29400 WORLD=4 RANK=2 examples/launch/torchrun.sh examples/elastic.py --steps 300
#
# A torchrun with several workers restarts all of them when one dies; this one has a single worker. What torchrun says
# about ranks concerns that worker alone: the job's rank and size go to the script as options. On a machine with several
# GPUs, run this script once for each, with its own CUDA_VISIBLE_DEVICES.
set -eu

script=$1
shift
rank=$RANK world=$WORLD store=$STORE
# A job that runs this script may itself have been started by torchrun.
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT 2>/dev/null || true
exec "${TORCHRUN:-torchrun}" --standalone --nproc-per-node 1 --max-restarts "${MAX_RESTARTS:-1000}" \
    "$script" --store "$store" --rank "$rank" --world "$world" "$@"
