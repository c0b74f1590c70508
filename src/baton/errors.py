"""The tree of Baton's errors; each has an HTTP status.

EngineError
  CallerError            400   the request is wrong; a retry will not help
    InvalidConfig              a setting is wrong; the message names it
    RequestRefused             the core will never run the request; the message has the numbers
  Overloaded             429   the server is full; try again later
  Unavailable            503   draining, paused, or the worker is lost for good
  ModelLoadError         500   a model cannot be served; the message names the file or tensor and what would work
    ModelNotFound              no folder, file, alias or hub model of that name
    ModelUnsupported           a complete model of an unsupported kind
    ModelFileBroken            truncated, wrong checksum, or tensors that do not fit the configuration
  StorageFailed          500   a storage backend of the KV cache failed; costs hits, never a request
  PeerUnreadable         500   the KV pool of another instance cannot be read; costs compute, never a request
  DeviceError            500   a GPU or its driver failed
  ProtocolError          500   unacceptable bytes on a wire (protocol/codec.py has the leaves)
    PeerError                  the peer of a channel sent an invalid message; never an error of our own
      LinkFailed               a session between router and instance cannot begin or continue
  InvariantBroken        500   a bug of ours: stop the process
"""

from __future__ import annotations

from typing import Literal


class EngineError(Exception):
    http_status: int = 500


class CallerError(EngineError):
    http_status = 400


class BadGrammar(CallerError):
    """The grammar is invalid or cannot be satisfied."""


class InvalidConfig(CallerError):
    """A setting is out of range or contradicts another one."""


class RequestRefused(CallerError):
    """This instance can never run the request."""


class Overloaded(EngineError):
    http_status = 429


class Unavailable(EngineError):
    http_status = 503


class ChildKilled(Unavailable):
    """A starting process was killed from outside; the next start may succeed."""


class ModelLoadError(EngineError):
    """The model cannot be loaded. Raised at start; no request sees it."""


class ModelNotFound(ModelLoadError):
    """No model of that name, locally or at the download source."""


class ModelUnsupported(ModelLoadError):
    """The files are valid, but hold an unsupported architecture, tensor type or setting."""


class ModelFileBroken(ModelLoadError):
    """The files are damaged or contradict each other."""


StorageReason = Literal["timeout", "unreachable", "full", "denied", "gone", "io", "protocol"]
"""Reasons of storage failures, also the metric's label. gone: the directory was removed. protocol: an invalid reply of the
store."""


class StorageFailed(EngineError):
    """A storage backend failed. The first `done` objects were processed before."""

    def __init__(self, reason: StorageReason, message: str, done: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.done = done


class PeerUnreadable(EngineError):
    """The KV pool of another instance cannot be read, or is not the requested one. `outcome` is the metric's label of such
    pulls (kvcache/messenger.py), `transport` the one that was tried last."""

    def __init__(self, message: str, outcome: str = "refused", transport: str = "none") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.transport = transport


class DeviceError(EngineError):
    """A call to the driver of a GPU failed."""


class ProtocolError(EngineError):
    """A peer violated the protocol."""


class PeerError(ProtocolError):
    """The peer of a channel sent bytes that are not a message. Only this error is the peer's fault."""


LinkReason = Literal[
    "secret",
    "certificate",
    "tls",
    "revoked",
    "version",
    "timeout",
    "closed",
    "crowded",
    "mac",
    "replay",
    "kind",
    "too_large",
    "malformed",
    "unread",
    "key_used_up",
]
"""Reasons for the failure of a session. Also the metric's label.

secret      the peer cannot prove that it knows the cluster's secret
certificate one side refuses the other's certificate: expired, or of another authority
tls         one side does not speak TLS, or not ours
revoked     the peer's name is revoked
version     the peer has another version, or another protocol
timeout     the handshake took too long
closed      the peer closed the connection during the handshake
crowded     too many concurrent handshakes, or too many open sessions
mac         a frame was modified, or is not the peer's
replay      a frame was repeated, or one is missing
kind        a message that this side never receives
too_large   a frame announces more bytes than allowed
malformed   a frame does not hold a message
unread      the peer does not read
key_used_up a key of TLS has encrypted as much as it may; the instance dials again
"""


class LinkFailed(PeerError):
    """A session over the network failed (runtime/wire/link.py)."""

    def __init__(self, reason: LinkReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvariantBroken(EngineError):
    """The engine's own state is inconsistent. `invariant`: its number in docs/internals/reliability.md, 0 if none."""

    def __init__(self, message: str, invariant: int = 0) -> None:
        super().__init__(f"[{invariant}] {message}" if invariant else message)
        self.invariant = invariant
