"""Runs a script with one thread per process, as torchrun does: forked processes ignore OMP_NUM_THREADS.

Run as `one_thread.py SCRIPT [ARGUMENT...]`.
"""

import runpy
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
