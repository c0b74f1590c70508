"""Validity dates of certificates, and warnings for the operator about expired and soon expiring ones.

Python's ssl has the dates of authorities only (get_ca_certs), and of a peer's certificate only if it is valid. So they are read
from the file: two times at a fixed place of the DER encoding (RFC 5280, section 4.1).

    Certificate -> TBSCertificate -> [version], serial number, algorithm, issuer, Validity (notBefore, notAfter), ...
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

ENDS_SOON: Final = timedelta(days=14)
_PEM: Final = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
_UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x17, 0x18, 0xA0


@dataclass(frozen=True, slots=True)
class Warned:
    text: str
    refused: bool
    "Whether clients that verify certificates refuse the server now."


def certificate_warning(
    file: str, now: datetime, option: str = "--ssl-certfile", remedy: str = "renew it and restart"
) -> Warned | None:
    """Warns of the first certificate in a PEM chain that is invalid now, else of the first that expires soon. None: all are
    valid, or no date can be read; tls.py reports an unusable file."""
    try:
        found = list(_validities(Path(file).read_text("ascii", "replace")))
    except (OSError, ValueError, IndexError):
        return None
    several = len(found) > 1
    warned = [
        _date_problem(f"certificate {place} of {len(found)}" if several else "the certificate", begin, end, now, remedy)
        for place, (begin, end) in enumerate(found, 1)
    ]
    worst = sorted((each for each in warned if each is not None), key=lambda each: not each.refused)
    return Warned(f"{option} {file}: {worst[0].text}", worst[0].refused) if worst else None


def _date_problem(which: str, begin: datetime, end: datetime, now: datetime, remedy: str) -> Warned | None:
    """The warning about one certificate: expired, not yet valid, or ending soon. None: it is valid for longer."""
    if now > end:
        return Warned(f"{which} EXPIRED on {_shown(end)}: clients that check it refuse this server; {remedy}", True)
    if now < begin:
        return Warned(f"{which} is NOT YET VALID, only from {_shown(begin)} on: clients that check it refuse this server", True)
    if end - now < ENDS_SOON:
        days = (end - now).days
        left = {0: "in less than a day", 1: "in a day"}.get(days, f"in {days} days")
        return Warned(f"{which} ends on {_shown(end)}, {left}: {remedy}", False)
    return None


def _shown(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _validities(pem: str) -> Iterator[tuple[datetime, datetime]]:
    for body in _PEM.findall(pem):
        certificate = ssl.PEM_cert_to_DER_cert(f"{ssl.PEM_HEADER}{body}{ssl.PEM_FOOTER}")
        _, outer, _ = _element(certificate)
        _, fields, _ = _element(outer)
        if fields[0] == _VERSION:
            fields = _element(fields)[2]
        for _ in ("serial number", "algorithm", "issuer"):
            fields = _element(fields)[2]
        _, validity, _ = _element(fields)
        kind, begin, rest = _element(validity)
        other_kind, end, _ = _element(rest)
        yield _moment(kind, begin), _moment(other_kind, end)


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """The first DER element: tag, content, and the remaining bytes."""
    tag, length, begin = data[0], data[1], 2
    if length >= 0x80:  # the low bits are the number of bytes of the length
        begin += length - 0x80
        length = int.from_bytes(data[2:begin])
    return tag, data[begin : begin + length], data[begin + length :]


def _moment(kind: int, value: bytes) -> datetime:
    """The time in a validity date. Both kinds are in seconds and UTC. Two-digit years below 50 are of this century (strptime:
    below 69)."""
    text = value.decode("ascii")
    if kind == _UTC_TIME:
        text = ("20" if text < "50" else "19") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
