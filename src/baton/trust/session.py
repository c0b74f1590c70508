"""Authenticates both sides of a connected socket (dialling.py) at the beginning of a session (handshake.py). The caller sets
the deadline, and closes the socket if this raises LinkFailed."""

from __future__ import annotations

import asyncio
import socket

from baton.errors import LinkFailed
from baton.protocol.versions import VERSIONS, Versions
from baton.trust.handshake import ANSWER_BYTES, GREETING_BYTES, PROOF_BYTES, Agreement, Handshake, Purpose, make_greeting
from baton.trust.secret import Secret


async def prove_as_listener(sock: socket.socket, secret: Secret, purpose: Purpose, versions: Versions = VERSIONS) -> Agreement:
    """Authenticate as the listening side. Raises LinkFailed; the socket stays the caller's."""
    greeting = make_greeting(purpose, versions)
    await _write(sock, greeting)
    answer = await _read(sock, ANSWER_BYTES, "the handshake was broken off by who dialled")
    handshake = Handshake(secret, greeting, answer[:GREETING_BYTES], purpose)
    handshake.check(purpose.dialler, answer[GREETING_BYTES:])
    await _write(sock, handshake.proof(purpose.listener))
    return Agreement(handshake.keys(), handshake.version)


async def prove_as_dialler(sock: socket.socket, secret: Secret, purpose: Purpose, versions: Versions = VERSIONS) -> Agreement:
    """Authenticate as the dialling side. Raises LinkFailed; the socket stays the caller's."""
    at_end = f"what listens there ended the connection: is it the {purpose.port}?"
    greeting = await _read(sock, GREETING_BYTES, at_end)
    reply = make_greeting(purpose, versions)
    try:
        handshake = Handshake(secret, greeting, reply, purpose)
    except LinkFailed:
        await _write(sock, reply + bytes(PROOF_BYTES))  # so that the listener, too, can name both versions
        raise
    await _write(sock, reply + handshake.proof(purpose.dialler))
    at_end = f"the {purpose.listener} broke the handshake off: does it have another cluster secret?"
    handshake.check(purpose.listener, await _read(sock, PROOF_BYTES, at_end))
    return Agreement(handshake.keys(), handshake.version)


async def _write(sock: socket.socket, content: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(sock, content)
    except OSError as error:
        raise LinkFailed("closed", f"the connection was lost in the handshake ({error.strerror})") from None


async def _read(sock: socket.socket, count: int, at_end: str) -> bytes:
    """Read not one byte more: the following bytes belong to the session."""
    content = b""
    while len(content) < count:
        try:
            piece = await asyncio.get_running_loop().sock_recv(sock, count - len(content))
        except OSError:
            piece = b""
        if not piece:
            raise LinkFailed("closed", at_end)
        content += piece
    return content
