"""The store for the rendezvous of a job, as a separate process, so that it outlives every rank.

Run it on a machine that all ranks reach, with `python examples/launch/store.py --port 29400`. Ranks that already are in
the job do not need it any more: if it dies, only processes that are started later miss it, and they can join by the
address of any rank.
"""

import argparse
import contextlib
import signal

from torch.distributed import TCPStore

parser = argparse.ArgumentParser(description="A store by which the ranks of a job meet.")
parser.add_argument("--host", default="0.0.0.0")
parser.add_argument("--port", type=int, default=29400)
arguments = parser.parse_args()

store = TCPStore(arguments.host, arguments.port, is_master=True, wait_for_workers=False)
print(f"store at {arguments.host}:{store.port}", flush=True)
signal.signal(signal.SIGTERM, signal.default_int_handler)
with contextlib.suppress(KeyboardInterrupt):
    signal.pause()
