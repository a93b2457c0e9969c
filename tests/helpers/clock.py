"""A wall clock that a test moves forward and back for one process, including kernel time stamps of packets."""

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

VARIABLE = "TEST_CLOCK_AHEAD"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead;  /* nanoseconds */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TEST_CLOCK_AHEAD");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *got = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (got != MAP_FAILED) ahead = got;
    close(file);
}

static void shift(struct timespec *time) {
    int64_t all = (ahead ? *ahead : 0) + time->tv_sec * 1000000000ll + time->tv_nsec;
    time->tv_sec = all / 1000000000ll;
    time->tv_nsec = all % 1000000000ll;
}

int clock_gettime(clockid_t which, struct timespec *time) {
    int result = (int)syscall(SYS_clock_gettime, which, time);
    if (result == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) shift(time);
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int recvmmsg(int file, struct mmsghdr *messages, unsigned count, int flags, struct timespec *timeout) {
    int got = (int)syscall(SYS_recvmmsg, file, messages, count, flags, timeout);
    for (int each = 0; each < got; ++each) {
        struct msghdr *head = &messages[each].msg_hdr;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(head); c; c = CMSG_NXTHDR(head, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_TIMESTAMPNS) continue;
            struct timespec stamp;
            memcpy(&stamp, CMSG_DATA(c), sizeof stamp);
            shift(&stamp);
            memcpy(CMSG_DATA(c), &stamp, sizeof stamp);
        }
    }
    return got;
}
"""


def build(folder: Path) -> Path | None:
    """Compiles what processes preload; None where there is no compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    (folder / "ahead").write_bytes(bytes(8))
    return library


def environment(library: Path) -> dict[str, str]:
    """Returns the environment of a process whose clock `jump` sets."""
    return {"LD_PRELOAD": str(library), VARIABLE: str(library.parent / "ahead")}


def jump(seconds: float) -> None:
    """Sets the clock of this process ahead of the true one by so much from now on."""
    with Path(os.environ[VARIABLE]).open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        memory[:] = struct.pack("q", int(1e9 * seconds))
