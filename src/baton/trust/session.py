"""Authenticates both sides of a connected stream (dialling.py, stream.py) at the beginning of a session (handshake.py). The
caller sets the deadline, and closes the socket if this raises LinkFailed."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import LinkFailed
from baton.protocol.versions import VERSIONS, Versions
from baton.trust.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    PROOF_BYTES,
    Agreement,
    Handshake,
    Purpose,
    make_greeting,
    proved_by,
)
from baton.trust.secret import Secret
from baton.trust.stream import SocketStream


async def prove_as_listener(
    stream: SocketStream, secrets: Sequence[Secret], purpose: Purpose, versions: Versions = VERSIONS
) -> Agreement:
    """Authenticate as the listening side, with the secret that the dialler has. Raises LinkFailed."""
    greeting = make_greeting(purpose, versions)
    await _write(stream, greeting)
    answer = await _read(stream, ANSWER_BYTES, "the handshake was broken off by who dialled")
    handshake = proved_by(secrets, greeting, answer, purpose)
    await _write(stream, handshake.proof(purpose.listener))
    return Agreement(handshake.keys(), handshake.version)


async def prove_as_dialler(
    stream: SocketStream, secrets: Sequence[Secret], purpose: Purpose, versions: Versions = VERSIONS
) -> Agreement:
    """Authenticate as the dialling side, with the first secret. Raises LinkFailed."""
    at_end = f"what listens there ended the connection: is it the {purpose.port}?"
    greeting = await _read(stream, GREETING_BYTES, at_end)
    reply = make_greeting(purpose, versions)
    try:
        handshake = Handshake(secrets[0], greeting, reply, purpose)
    except LinkFailed:
        await _write(stream, reply + bytes(PROOF_BYTES))  # so that the listener, too, can name both versions
        raise
    await _write(stream, reply + handshake.proof(purpose.dialler))
    at_end = f"the {purpose.listener} broke the handshake off: does it have another cluster secret?"
    handshake.check(purpose.listener, await _read(stream, PROOF_BYTES, at_end))
    return Agreement(handshake.keys(), handshake.version)


async def _write(stream: SocketStream, content: bytes) -> None:
    try:
        await stream.send(content)
    except OSError as error:
        raise LinkFailed("closed", f"the connection was lost in the handshake ({error.strerror})") from None


async def _read(stream: SocketStream, count: int, at_end: str) -> bytes:
    """Read exactly this many bytes: the following ones belong to the session."""
    content = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        try:
            received = await stream.receive_into(content[filled:])
        except OSError:
            received = 0
        if not received:
            raise LinkFailed("closed", at_end)
        filled += received
    return bytes(content)
