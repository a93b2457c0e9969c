#!/bin/sh
# Runs a command until it succeeds: one rank of a job that goes on while this one is away.
#
#     examples/launch/loop.sh python examples/elastic.py --store tcp://host:29400 --rank 2 --world 4
#
# SIGTERM reaches the rank, which hands over what it owns, and ends the loop.
set -u

child=
stopped=0
stop() {
    stopped=1
    [ -n "$child" ] && kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT

while [ "$stopped" -eq 0 ]; do
    "$@" &
    child=$!
    wait "$child"
    status=$?
    # A signal interrupts the first wait; the rank may take a while to leave.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        status=$?
    done
    [ "$status" -eq 0 ] && exit 0
    [ "$stopped" -ne 0 ] && exit "$status"
    echo "loop.sh: exit status $status; starts again in ${RESTART_S:-1} s" >&2
    sleep "${RESTART_S:-1}"
done
