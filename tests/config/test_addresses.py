"""Addresses of a router's cluster port, as people write them."""

import pytest

from baton.addresses import Address, parse_address
from baton.errors import InvalidConfig


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.5:9100", Address("10.0.0.5", 9100)),
        ("router.example:1", Address("router.example", 1)),
        ("tcp://[::1]:65535", Address("::1", 65535)),
        ("unix:/run/baton.sock", Address(path="/run/baton.sock")),
        ("unix:///run/baton.sock", Address(path="/run/baton.sock")),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address):
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "router", "router:", ":9100", "tcp://router", "router:0", "router:65536", "router:-1", "router:٣", "a b:1"),
        *(
            "::1:5",
            "http://router:8000",
            "unix:",
            "unix:relative",
            "unix:/" + "x" * 200,
            "tcp://router:9100/path",
            "unix:/a\0b",
        ),
        *("router..example:1", ".example:1", "x" * 64 + ":1"),  # a look-up would raise a UnicodeError, and not an OSError
    ],
)
def test_what_is_none_is_refused(text: str):
    with pytest.raises(InvalidConfig, match="give"):
        parse_address(text)
