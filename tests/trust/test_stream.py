"""Bytes through TLS, when the connection fails."""

import asyncio
import socket
from types import SimpleNamespace

from baton.trust.stream import SocketStream


def test_a_failed_write_keeps_no_view_of_what_it_sent():
    """A KV pool was closed while the traceback of a lost connection still held a view of its memory."""
    sock, peer = socket.socketpair()
    peer.close()
    memory = bytearray(1000)

    async def stream() -> SocketStream:
        return SocketStream(sock, SimpleNamespace(encrypt=bytes))

    writer, failed = asyncio.run(stream()), None
    try:
        with memoryview(memory) as view:
            writer.write(view)
    except OSError as error:
        failed = error  # and its traceback, with the frames of all calls
    assert failed is not None
    memory.append(0)  # raises BufferError while there is a view
    sock.close()
