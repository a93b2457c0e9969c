"""Numbered datagrams between two lab hosts: run as a script on either side; needs Python alone.

lab_traffic.py receive PORT SECONDS      prints the numbers that arrived, as JSON, at ^C or after SECONDS of silence
lab_traffic.py send ADDRESS PORT COUNT PAUSE_S BYTES
"""

import json
import socket
import sys
import time

SO_RCVBUFFORCE = 33  # of Linux: beyond the system's limit, for root


def receive(port: int, quiet_s: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:  # room for all, as this process may have to wait for its turn
            sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sock.bind(("", port))
        print("ready", flush=True)
        numbers = []
        sock.settimeout(10.0)  # until the first one
        try:
            while True:
                numbers.append(int.from_bytes(sock.recv(2048)[:4], "big"))
                sock.settimeout(quiet_s)
        except (TimeoutError, KeyboardInterrupt):
            pass
    print(json.dumps(numbers))


def send(address: str, port: int, count: int, pause_s: float, size: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        due = time.monotonic()
        for number in range(count):
            sock.sendto(number.to_bytes(4, "big").ljust(size, b"\0"), (address, port))
            due += pause_s
            if (wait := due - time.monotonic()) > 0:
                time.sleep(wait)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]), float(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
