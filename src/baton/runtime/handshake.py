"""How router and instance prove to each other that they know the cluster's secret, and what keys a session has. No IO here.

    router   --- greeting: magic, versions, nonce ------------> instance
    router   <-- answer: magic, versions, nonce, proof -------- instance     the one who dials proves first
    router   --- proof ---------------------------------------> instance

A proof is HMAC-SHA256(secret, who proves it + everything said before). It names the role, so neither side can be made to prove
something that it could be sent back as the other's proof; both nonces are in it, so none can be used twice. The two keys of
the session are made the same way, one for each direction. All messages have a fixed size: nothing is allocated on the word of
somebody who has proved nothing.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Final, Literal, NamedTuple

from baton.errors import LinkFailed
from baton.protocol.codec import VERSION
from baton.runtime.secret import Secret

Side = Literal["router", "instance"]

LINK_VERSION: Final = 1
_MAGIC: Final = b"BTLK"
_GREETING: Final = struct.Struct("!4sBB32s")
PROOF_BYTES: Final = 32
GREETING_BYTES: Final = _GREETING.size
ANSWER_BYTES: Final = GREETING_BYTES + PROOF_BYTES


class SessionKeys(NamedTuple):
    """Each direction has one of its own: a frame cannot be sent back to its sender."""

    from_router: bytes
    from_instance: bytes


def make_greeting() -> bytes:
    return _GREETING.pack(_MAGIC, LINK_VERSION, VERSION, secrets.token_bytes(32))


class Handshake:
    """One side's view. `greeting` is the router's, `reply` what the instance says before its proof: a greeting too."""

    def __init__(self, secret: Secret, greeting: bytes, reply: bytes) -> None:
        for theirs in (greeting, reply):
            _check_greeting(theirs)
        self._secret = secret
        self._said = greeting + reply

    def proof(self, side: Side) -> bytes:
        return self._derived(f"baton link: proof of the {side}")

    def check(self, side: Side, proof: bytes) -> None:
        if not hmac.compare_digest(self.proof(side), proof):
            raise LinkFailed("secret", f"the {side} does not know our cluster secret: both must have the same file")

    def keys(self) -> SessionKeys:
        return SessionKeys(self._derived("baton link: key of the router"), self._derived("baton link: key of the instance"))

    def _derived(self, what: str) -> bytes:
        return hmac.digest(self._secret.key, what.encode() + b"\0" + self._said, "sha256")


def _check_greeting(greeting: bytes) -> None:
    magic, link, codec, _ = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise LinkFailed("version", "what listens or dials there is no Baton router or instance: is it the cluster port?")
    if (link, codec) != (LINK_VERSION, VERSION):
        raise LinkFailed(
            "version", f"the peer speaks version {link}.{codec}, we speak {LINK_VERSION}.{VERSION}: update one of them"
        )
