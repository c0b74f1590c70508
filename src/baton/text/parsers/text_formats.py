"""Formats of JSON Schema as regular expressions of the grammar, for arguments that are text without quotes.

They allow the texts that the grammar's own JSON rules allow for these formats, so a strict tool means the same in every style
of calls. Other formats refuse the tool, there and here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_DATE: Final = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_SECONDS: Final = "[0-9]+S"
_MINUTES: Final = f"[0-9]+M(?:{_SECONDS})?"
_HOURS: Final = f"[0-9]+H(?:{_MINUTES})?"
_CLOCK: Final = f"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_MONTHS: Final = "[0-9]+M(?:[0-9]+D)?"
_DAYS: Final = f"(?:[0-9]+Y(?:{_MONTHS})?|{_MONTHS}|[0-9]+D)"
_DURATION: Final = f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"

_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_H16: Final = "[0-9a-fA-F]{1,4}"
_COMPRESSED: Final = "|".join(
    [
        *(f"(?:(?:{_H16}:){{0,{6 - after}}}{_H16})?::(?:{_H16}:){{{after - 1}}}{_H16}" for after in range(1, 7)),
        f"::(?:{_H16}:){{6}}{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
)
"""One or more groups of zeros are left out: at most seven remain, `after` of them at the end."""
_IPV6: Final = f"(?:{_H16}:){{7}}{_H16}|{_COMPRESSED}"

_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_WORD: Final = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_SUBDOMAIN: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"

_HEX: Final = "[0-9a-fA-F]"
_ESCAPED: Final = f"%{_HEX}{{2}}"
_UNRESERVED: Final = r"a-zA-Z0-9\-._~!$&'()*+,;="
_PATH_CHARACTER: Final = f"(?:[{_UNRESERVED}:@]|{_ESCAPED})"
_USER: Final = f"(?:(?:[{_UNRESERVED}:]|{_ESCAPED})*@)?"
_HOST: Final = rf"(?:\[(?:{_IPV6}|v{_HEX}+\.[{_UNRESERVED}:]+)\]|(?:[{_UNRESERVED}]|{_ESCAPED})*)"
_SEGMENTS: Final = f"(?:/{_PATH_CHARACTER}*)*"
_ROOTLESS: Final = f"{_PATH_CHARACTER}+{_SEGMENTS}"
_PATH: Final = f"(?://{_USER}{_HOST}(?::[0-9]*)?{_SEGMENTS}|/(?:{_ROOTLESS})?|{_ROOTLESS}|)"
_QUERY: Final = f"(?:{_PATH_CHARACTER}|[/?])*"

FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": _DURATION,
        "email": rf"{_WORD}(?:\.{_WORD})*@(?:{_SUBDOMAIN}(?:\.{_SUBDOMAIN})*|\[{_IPV4}\])",
        "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
        "uri": rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(?:\?{_QUERY})?(?:#{_QUERY})?",
    }
)
"""Regular expressions of whole texts, by the format's name."""
