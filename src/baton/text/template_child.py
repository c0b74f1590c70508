"""The process that renders chat templates: `python -m baton.text.template_child MEMORY_BYTES_MAX`, its socket as stdin.

It may be killed at any moment: it keeps nothing but compiled templates. What bounds it:

memory   RLIMIT_AS. A template that reaches it gets a MemoryError, and the process ends, because its heap may stay full.
time     the parent kills it at the deadline. A timer does so where the parent is gone (while idle, the end of the socket).
the rest no core file (it would hold prompts), no file can be written, and the kernel ends it first when memory runs out.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from baton.text.child_limits import bound_this_process
from baton.text.template_sandbox import TemplateSandbox
from baton.text.template_wire import Kind, Request, frame, receive, send

_TIMER_SECONDS_MORE = 1.0


def serve(sock: socket.socket) -> None:
    """Until the parent closes the socket, or memory ran out."""
    sandbox = TemplateSandbox()
    send(sock, frame(("ok", "")))
    kind: Kind = "ok"
    while kind != "memory":
        try:
            request = receive(sock)
        except ConnectionError:
            return
        signal.setitimer(signal.ITIMER_REAL, request["seconds_max"] + _TIMER_SECONDS_MORE)
        kind, message = _answer(sandbox, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(sock, message)


def _answer(sandbox: TemplateSandbox, request: Request) -> tuple[Kind, bytearray]:
    try:
        reply = sandbox.answer(request)
        return reply[0], frame(reply)
    except MemoryError:  # for the frame, after all
        return "memory", frame(("memory", ""))


def main() -> None:
    bound_this_process(int(sys.argv[1]))
    sock = socket.socket(fileno=0)
    # From here on nothing may reach the log: it could repeat a prompt.
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    serve(sock)


if __name__ == "__main__":
    main()
