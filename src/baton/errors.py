"""Every error of ours, as one tree; each knows whose fault it is and what HTTP says about it.

EngineError
  CallerError            400   the request is wrong; sending it again will not help
    InvalidConfig              a setting is wrong; the message names it
    RequestRefused             the core's answer to a request it will never run, with the numbers
  Overloaded             429   we are full; try again later
  Unavailable            503   draining, paused, or the worker is gone for good
  ModelLoadError         500   a model cannot be served; the message names the file or tensor and what would work
    ModelNotFound              no folder, file, alias or hub model of that name
    ModelUnsupported           a whole model, but of a kind that we do not run
    ModelFileBroken            truncated, wrong checksum, or tensors that do not fit the configuration
  StorageFailed          500   a storage backend of the KV cache does not work; costs hits, never a request
  PeerUnreadable         500   the KV pool of another instance cannot be read; costs computing, never a request
  DeviceError            500   a GPU, or its driver, did not do what it was asked
  ProtocolError          500   bytes on a wire that we cannot accept (see protocol/codec.py for the leaves)
    PeerError                  what the peer of a channel sent is no message; never an error of our own
      LinkFailed               a session between router and instance cannot begin, or cannot go on
  InvariantBroken        500   our fault: stop, do not go on
"""

from __future__ import annotations

from typing import Literal


class EngineError(Exception):
    http_status: int = 500
    retryable: bool = False


class CallerError(EngineError):
    http_status = 400


class BadGrammar(CallerError):
    """A request's grammar is none, or asks for what nobody can do."""


class InvalidConfig(CallerError):
    """A setting is out of range or contradicts another one."""


class RequestRefused(CallerError):
    """The request can never be run by this instance."""


class Overloaded(EngineError):
    http_status = 429
    retryable = True


class Unavailable(EngineError):
    http_status = 503
    retryable = True


class ChildKilled(Unavailable):
    """A process that was starting was killed from outside. That says nothing about the next start."""


class ModelLoadError(EngineError):
    """The model cannot be brought into memory. An instance says this at start; no request ever sees it."""


class ModelNotFound(ModelLoadError):
    """Nothing of that name, here or where we may fetch from."""


class ModelUnsupported(ModelLoadError):
    """The files are fine, but hold an architecture, a tensor type or a setting that we do not run."""


class ModelFileBroken(ModelLoadError):
    """The files are damaged or contradict each other."""


StorageReason = Literal["timeout", "unreachable", "full", "denied", "gone", "io", "protocol"]
"""Also the metric's label. gone: the directory was taken away. protocol: an answer that the store should not give."""


class StorageFailed(EngineError):
    """A storage backend did not do what it was asked. `done` leading objects were dealt with before that."""

    def __init__(self, reason: StorageReason, message: str, done: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.done = done


class PeerUnreadable(EngineError):
    """Another instance does not let us read its KV pool, or not the one we asked for.

    `outcome` is the word by which such pulls are counted (kvcache/messenger.py), `transport` the one that was tried last.
    """

    def __init__(self, message: str, outcome: str = "refused", transport: str = "none") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.transport = transport


class DeviceError(EngineError):
    """What the driver of a GPU said no to."""


class ProtocolError(EngineError):
    """A peer sent something that is not in the protocol."""


class PeerError(ProtocolError):
    """The other side of a channel sent bytes that are no message. Only this may be blamed on it."""


LinkReason = Literal[
    "secret", "version", "timeout", "closed", "crowded", "mac", "replay", "kind", "too_large", "malformed", "unread"
]
"""Why a session did not begin, or was ended. Also the metric's label.

secret      the other side does not prove that it knows the cluster's secret
version     it speaks another version, or something else
timeout     the handshake took too long
closed      it ended the connection in the handshake
crowded     too many others were in their handshake, or too many sessions are open
mac         a frame was changed on its way, or is not the peer's
replay      a frame came again, or one is missing
kind        a message that this side never sends
too_large   a frame promises more bytes than are allowed
malformed   a frame holds something that is no message
unread      the peer does not read
"""


class LinkFailed(PeerError):
    """A session over the network (runtime/wire/link.py)."""

    def __init__(self, reason: LinkReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvariantBroken(EngineError):
    """The engine found its own state impossible. `invariant` is the number in docs/internals/reliability.md, 0 if none."""

    def __init__(self, message: str, invariant: int = 0) -> None:
        super().__init__(f"[{invariant}] {message}" if invariant else message)
        self.invariant = invariant
