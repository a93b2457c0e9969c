"""One bulk TCP flow, as competing traffic; run as a script on lab hosts, needs only Python.

bulk.py receive PORT            prints "ready", then [[monotonic seconds, bytes so far], ...] when the flow has ended
bulk.py send ADDRESS PORT CONGESTION_CONTROL SECONDS
"""

import contextlib
import json
import socket
import struct
import sys
import time

_STEP_S = 0.05
_QUIET_S = 5.0


def receive(port: int) -> None:
    """Counts the bytes of one connection."""
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        server.settimeout(30)
        stream, _ = server.accept()
        with stream:
            stream.settimeout(_QUIET_S)
            total, log = 0, [(time.monotonic(), 0)]
            buffer = memoryview(bytearray(1 << 18))
            # The sender ends the connection by a reset; if that is lost, the receive times out.
            with contextlib.suppress(ConnectionResetError, TimeoutError):
                while count := stream.recv_into(buffer):
                    total += count
                    if (now := time.monotonic()) - log[-1][0] >= _STEP_S:
                        log.append((now, total))
    print(json.dumps(log))


def send(address: str, port: int, congestion_control: str, seconds: float) -> None:
    """Sends zeros as fast as TCP allows."""
    with socket.create_connection((address, port), timeout=30) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        data = bytes(1 << 17)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stream.sendall(data)
        # Discard queued data, which would otherwise be sent after the end.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
