"""TLS between members of a cluster: 1.3, mutual. Both sides show a certificate of the cluster's authorities. No IO here.

Names in certificates are not compared with addresses: instances come and go at addresses that no certificate can list. A
certificate of these authorities is one of the cluster, so they must sign nothing else. They serve to revoke (secret.py). The
proof of the secret (handshake.py) follows inside.
"""

from __future__ import annotations

import ssl
from typing import Any, Final, NamedTuple, cast

from baton.errors import InvalidConfig, LinkFailed

ALERT: Final = "_ALERT_"
"""Part of OpenSSL's name of an error that the other side reports."""
BOTH: Final = "both sides need --cluster-ssl-certfile, or neither"
OF_CERTIFICATES: Final = ("CERTIFICATE", "UNKNOWN_CA")
UNKNOWN_AUTHORITY: Final = (18, 19, 20, 21)
"""Error numbers of OpenSSL (X509_V_ERR_*) for a certificate that no known authority has signed, or its chain."""


class TlsContexts(NamedTuple):
    listener: ssl.SSLContext
    dialler: ssl.SSLContext


class TlsFiles(NamedTuple):
    certfile: str
    keyfile: str
    "File with the key. Empty: the key is in the file of the certificate."
    ca_certs: str

    def contexts(self) -> TlsContexts:
        """TLS contexts for both directions. Raises InvalidConfig."""
        return TlsContexts(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # a reader that waits takes any bytes for the end of the session
        key = f" and --cluster-ssl-keyfile {self.keyfile}" if self.keyfile else ""
        named = f"--cluster-ssl-certfile {self.certfile}{key}"
        try:
            context.load_cert_chain(self.certfile, self.keyfile or None, _no_password)
            named = f"--cluster-ssl-ca-certs {self.ca_certs}"
            context.load_verify_locations(self.ca_certs)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidConfig(f"{named}: cannot be used ({_why(error)}); give files in PEM form") from None
        return context


class TlsLayer:
    """TLS of one connection: turns bytes to send into records, and received records into bytes. `peer`: the other side, for
    messages. Errors raise LinkFailed; an alert for the other side is then in `pending`."""

    def __init__(self, contexts: TlsContexts, *, listens: bool, peer: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = contexts.listener if listens else contexts.dialler
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self.peer = peer

    def handshake(self) -> bool:
        """Continue the handshake with the records received so far. True: it is complete."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise _failure(error, self.peer) from None
        return True

    def pending(self) -> bytes:
        """Records to send."""
        return self._outgoing.read()

    def feed(self, records: memoryview) -> None:
        self._incoming.write(records)

    def read_into(self, view: memoryview) -> int:
        """Decrypt bytes into `view` and return their number. 0: more records are needed."""
        done = 0
        try:
            while done < len(view):
                with view[done:] as rest:
                    count = cast(int, self._object.read(len(rest), rest))  # bytes without a buffer
                if not count:
                    raise LinkFailed("closed", f"the {self.peer} has ended the session")
                done += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise _failure(error, self.peer) from None
        return done

    def encrypt(self, content: memoryview | bytes) -> bytes:
        done = 0
        while done < len(content):
            with memoryview(content)[done:] as rest:
                done += self._object.write(rest)
        return self.pending()

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the other side's certificate: common names and alternative names."""
        certificate: dict[str, Any] = self._object.getpeercert() or {}
        subject = [pair for part in certificate.get("subject", ()) for pair in part]
        common = [value for kind, value in subject if kind == "commonName"]
        return (*common, *(value for _, value in certificate.get("subjectAltName", ())))


def _failure(error: ssl.SSLError, peer: str) -> LinkFailed:
    reason = error.reason or ""
    words = (reason.rpartition(ALERT)[2] or str(error)).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        foreign = "; its authority is not in --cluster-ssl-ca-certs" if error.verify_code in UNKNOWN_AUTHORITY else ""
        return LinkFailed("certificate", f"the {peer}'s certificate is refused: {error.verify_message}{foreign}")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return LinkFailed("certificate", f"the {peer} shows no certificate")
    if ALERT in reason and any(word in reason for word in OF_CERTIFICATES):
        return LinkFailed("certificate", f"the {peer} refuses our certificate (--cluster-ssl-certfile): {words}")
    if ALERT in reason:
        return LinkFailed("tls", f"the {peer} has ended the TLS handshake: {words}")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"):
        return LinkFailed("tls", f"the {peer} does not speak TLS: {BOTH}")
    return LinkFailed("tls", f"TLS with the {peer} failed: {words}")


def _no_password() -> str:
    """Refuse a key with a password. Without this callback every process that reads the key would ask for it on the terminal."""
    raise ValueError("the key has a password: make a copy without one that only this user may read")


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
