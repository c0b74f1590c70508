"""The handshake: two processes prove to each other that they know the cluster's secret, and derive the keys of their session.
No IO here.

    listener  --- greeting: magic, versions, nonce ------------> dialler     with the range of its message versions
    listener  <-- answer: magic, versions, nonce, proof -------- dialler     the dialler proves first
    listener  --- proof ---------------------------------------> dialler

A proof is HMAC-SHA256(secret, purpose and role + all bytes exchanged before). It names the role, so a proof cannot be reflected
as the other side's; it names the purpose, so a proof for one kind of session is invalid for another; it covers both nonces, so
none can be replayed. The two keys of the session are derived the same way, one per direction. All messages have a fixed size:
no allocation depends on a peer that is not authenticated.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from baton.errors import LinkFailed
from baton.protocol.versions import VERSIONS, Versions
from baton.trust.secret import Secret
from baton.trust.tls import BOTH

LINK_VERSION: Final = 2
"""Format of the handshake and of sealed frames. The number is not negotiated: it defines how a greeting is read."""
_GREETING: Final = struct.Struct("!4sBBB31s")
"""Length of a greeting, which is that of LINK_VERSION 1, so that both versions can refuse each other with a reason."""
PROOF_BYTES: Final = 32
TLS_RECORD: Final = b"\x16\x03"
"""First bytes of a connection with TLS."""
GREETING_BYTES: Final = _GREETING.size
ANSWER_BYTES: Final = GREETING_BYTES + PROOF_BYTES


class Purpose(NamedTuple):
    """Purpose of a session: listener and dialler, and the port, in words for users."""

    magic: bytes
    name: str
    listener: str
    dialler: str
    port: str


LINK: Final = Purpose(b"BTLK", "link", "router", "instance", "router's cluster port")
READ: Final = Purpose(b"BTRD", "read", "peer", "reader", "peer's transfer address")


class SessionKeys(NamedTuple):
    """One key per direction: a frame cannot be reflected to its sender."""

    from_listener: bytes
    from_dialler: bytes


class Agreement(NamedTuple):
    """Result of a handshake."""

    keys: SessionKeys
    version: int
    "Version of messages, in both directions."


def make_greeting(purpose: Purpose = LINK, versions: Versions = VERSIONS) -> bytes:
    return _GREETING.pack(purpose.magic, LINK_VERSION, versions.newest, versions.oldest, secrets.token_bytes(31))


class Handshake:
    """One side of the handshake. `greeting` is the listener's, `reply` the dialler's before its proof: a greeting too."""

    def __init__(self, secret: Secret, greeting: bytes, reply: bytes, purpose: Purpose = LINK) -> None:
        listener, dialler = _versions(greeting, purpose), _versions(reply, purpose)
        version = listener.common(dialler)
        if version is None:
            raise LinkFailed(
                "version",
                f"the {purpose.listener} speaks version {listener} and the {purpose.dialler} {dialler}: update the older one",
            )
        self.version = version
        self._secret = secret
        self._exchanged = greeting + reply
        self._purpose = purpose

    def proof(self, side: str) -> bytes:
        return self._derived(f"proof of the {side}")

    def proves(self, side: str, proof: bytes) -> bool:
        return hmac.compare_digest(self.proof(side), proof)

    def check(self, side: str, proof: bytes) -> None:
        if not self.proves(side, proof):
            raise LinkFailed("secret", f"the {side} does not know our cluster secret: both must have the same file")

    def keys(self) -> SessionKeys:
        return SessionKeys(*(self._derived(f"key of the {side}") for side in (self._purpose.listener, self._purpose.dialler)))

    def _derived(self, what: str) -> bytes:
        return hmac.digest(self._secret.key, f"baton {self._purpose.name}: {what}".encode() + b"\0" + self._exchanged, "sha256")


def proved_by(secrets: Sequence[Secret], greeting: bytes, answer: bytes, purpose: Purpose = LINK) -> Handshake:
    """The listener's handshake, with the secret that the dialler has proved to know. Raises LinkFailed."""
    reply, proof = answer[:GREETING_BYTES], answer[GREETING_BYTES:]
    for secret in secrets:
        handshake = Handshake(secret, greeting, reply, purpose)
        if handshake.proves(purpose.dialler, proof):
            return handshake
    ours = "our cluster secret" if len(secrets) == 1 else f"any of our {len(secrets)} cluster secrets"
    raise LinkFailed("secret", f"the {purpose.dialler} does not know {ours}: both must have the same file")


def _versions(greeting: bytes, purpose: Purpose) -> Versions:
    magic, link, newest, oldest, _ = _GREETING.unpack(greeting)
    if magic.startswith(TLS_RECORD):
        raise LinkFailed("tls", f"the other side speaks TLS, and this one does not: {BOTH}")
    if magic != purpose.magic:
        sides = f"{purpose.listener} or {purpose.dialler}"
        raise LinkFailed("version", f"what listens or dials there is no Baton {sides}: is it the {purpose.port}?")
    if link != LINK_VERSION:
        raise LinkFailed(
            "version", f"one side speaks version {link}.{newest}, the other {LINK_VERSION}.{VERSIONS}: update the older one"
        )
    return Versions(oldest, newest)
