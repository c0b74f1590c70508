"""Addresses of a router's cluster port, as people write them."""

import pytest

from baton.addresses import Address, RouterSource, parse_address, parse_address_lines, parse_router
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


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("dns://routers.baton.svc:8100", RouterSource(name=Address("routers.baton.svc", 8100))),
        ("file:/etc/baton/routers", RouterSource(path="/etc/baton/routers")),
        ("file:///etc/baton/routers", RouterSource(path="/etc/baton/routers")),
        ("file:routers", RouterSource(path="routers")),
        ("tcp://10.0.0.5:9100", Address("10.0.0.5", 9100)),
    ],
)
def test_sources_of_addresses_are_read_and_written(text: str, place: Address | RouterSource):
    assert parse_router(text) == place
    assert parse_router(str(place)) == place


@pytest.mark.parametrize(
    "text", ["dns://", "dns://name", "dns://name:0", "dns://a..b:1", "dns:name:1", "file:", "file:a\0b", "srv://a:1"]
)
def test_what_is_no_source_is_refused(text: str):
    with pytest.raises(InvalidConfig, match="give "):
        parse_router(text)


def test_a_file_has_an_address_per_line_and_comments():
    text = "# ours\n\n tcp://10.0.0.5:9100 # the first\nunix:/run/baton.sock\r\n10.0.0.6:1"
    assert parse_address_lines(text) == (Address("10.0.0.5", 9100), Address(path="/run/baton.sock"), Address("10.0.0.6", 1))
    assert parse_address_lines("# nothing\n") == ()
    with pytest.raises(InvalidConfig, match="line 2: 'dns://other:1' is no"):
        parse_address_lines("a:1\ndns://other:1")
