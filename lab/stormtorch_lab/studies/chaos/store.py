"""The store for the rendezvous of a chaos run: a process on one host, cut off whenever that host is.

python -m stormtorch_lab.studies.chaos.store ADDRESS PORT
"""

import sys
import threading

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked as exported


def main() -> None:
    """Serves until it is killed."""
    address, port = sys.argv[1], int(sys.argv[2])
    store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    print(f"serves at port {store.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
