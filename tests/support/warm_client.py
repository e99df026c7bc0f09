"""Stands in for `python` where a program starts others: they are forked by the server, too.

`python -SE warm_client.py SOCKET <words>` hands its words, folder, environment and streams to the
server of tests/support/warm_python.py, passes signals on and ends as the program did. It imports
little, for it is started once for each rank. When it is killed the server kills the program.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType

# Of the interpreter, which a forked program can do without, and how many words each is.
SETTINGS = {"-u": 1, "-B": 1, "-E": 1, "-W": 2}
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(path: str, words: list[str]) -> int:
    """Have the server run the program; returns its status, minus a signal's number."""
    given = words
    while given and given[0] in SETTINGS:
        given = given[SETTINGS[given[0]] :]
    if not given or (given[0].startswith("-") and given[0] not in ("-m", "-c")):
        os.execv(sys.executable, [sys.executable, *words])  # noqa: S606
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    streams = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (1, 2, 0)]
    program = [given, os.getcwd(), dict(os.environ), *streams]
    server.sendall(json.dumps(program).encode() + b"\n")
    lines = server.makefile("r")
    pid = int(lines.readline())

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    return int(lines.readline())


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2:])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
