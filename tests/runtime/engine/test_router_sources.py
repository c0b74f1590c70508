"""Routers that are found by a name or in a file: real sessions, a fake name server."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import pytest
from engine_rig import Rig
from fake_router import FakeRouter
from fake_worker import expected
from link_rig import SECRET
from run_loop import finish

from baton.addresses import Address, RouterSource, parse_router
from baton.core import discovery, redial_times
from baton.errors import InvalidConfig
from baton.runtime.engine import router_sources
from baton.runtime.engine.router_sources import addresses_of
from baton.trust.dialling import Place
from baton.trust.secret import Secret

pytestmark = pytest.mark.usefixtures("child_path")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redial_times, "RETRY_SECONDS_MAX", 0.2)
    monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(discovery, "LOOKUP_SECONDS_MIN", 0.05)
    monkeypatch.setattr(discovery, "GONE_SECONDS", 0.5)


def rig_of(folder: Path, router: str) -> Rig:
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_bytes(SECRET.key)
    return Rig(engine={"routers": (router,), "cluster_secret": str(secret), "name": "node-1", "drain_seconds_max": 0.1})


def test_every_address_in_a_file_is_dialled_and_one_that_is_gone_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    file = tmp_path / "routers"

    async def main() -> None:
        async with FakeRouter(SECRET) as first, FakeRouter(SECRET) as second, rig_of(tmp_path, f"file:{file}") as rig:
            await rig.until(lambda: "No such file" in caplog.text)
            file.write_text(f"# two\n{first.address}\n{second.address}\n")
            old, kept = await first.visit(), await second.visit()
            file.write_text(str(second.address))
            await rig.until(lambda: old.over)
            file.write_text("no address at all")
            await rig.until(lambda: "line 1: " in caplog.text)
            file.unlink()
            await rig.until(lambda: caplog.text.count("No such file") == 2)
            kept.ask("a")
            await rig.until(lambda: "a" in kept.ended)
            assert kept.tokens["a"] == expected(5, 12)
            assert not kept.over
            assert (len(first.visits), len(second.visits)) == (1, 1)
        assert rig.running.exception() is None

    finish(main())
    assert caplog.text.count("No such file") == 2, "once per change"


def test_a_name_that_answers_nothing_and_changes_ends_no_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    hosts: list[str] = []

    async def answer(address: Address) -> list[Place]:
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, (host, address.port)) for host in hosts]

    monkeypatch.setattr(router_sources, "resolved", answer)

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(tmp_path, f"dns://routers.svc:{router.address.port}") as rig:
            await rig.until(lambda: "Name or service not known" in caplog.text)
            hosts[:] = ["127.0.0.9", "127.0.0.1"]  # at one of them is nothing
            visit = await router.visit()
            await rig.until(lambda: rig.engine.stats().router_sessions.get("unreachable", 0) >= 2)
            hosts.clear()
            await rig.until(lambda: caplog.text.count("Name or service not known") == 2)
            visit.link.close()
            again = await router.visit(lambda now: now is not visit and bool(now.beats))
            again.ask("a")
            await rig.until(lambda: "a" in again.ended)
            assert again.tokens["a"] == expected(5, 12)
        assert rig.running.exception() is None

    finish(main())


def test_strangers_at_a_name_are_reported_and_disturb_no_other_router(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A web server, a router of another cluster, and a program that accepts and says nothing."""
    file = tmp_path / "routers"

    async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async def main() -> None:
        web, silent = [await asyncio.start_server(each, "127.0.0.1", 0) for each in (web_server, silence)]
        places = ["{}:{}".format(*each.sockets[0].getsockname()) for each in (web, silent)]
        async with (
            FakeRouter(SECRET) as ours,
            FakeRouter(Secret(b"of another cluster, and as long")) as theirs,
            rig_of(tmp_path, f"file:{file}") as rig,
        ):
            file.write_text("\n".join([*places, str(theirs.address), str(ours.address)]))
            visit = await ours.visit()
            await rig.until(lambda: "there is no Baton router" in caplog.text)
            await rig.until(lambda: "does not know our cluster secret" in caplog.text)
            visit.ask("a")
            await rig.until(lambda: "a" in visit.ended)
            assert visit.tokens["a"] == expected(5, 12)
            assert len(ours.visits) == 1
            assert not theirs.visits
            file.write_text(str(ours.address))
            await rig.until(lambda: rig.engine.stats().routers == 1)
            assert not visit.over
        web.close()
        silent.close()
        assert rig.running.exception() is None

    finish(main())


def test_a_name_has_addresses_of_one_family(monkeypatch: pytest.MonkeyPatch):
    async def answer(address: Address) -> list[Place]:
        return [
            (socket.AF_INET6, ("fd00::1", address.port, 0, 0)),
            (socket.AF_INET6, ("fd00::2", address.port, 0, 0)),
            (socket.AF_INET, ("10.0.0.1", address.port)),
        ]

    monkeypatch.setattr(router_sources, "resolved", answer)
    found = finish(addresses_of(RouterSource(name=Address("routers", 8100))))
    assert [str(address) for address in found] == ["tcp://[fd00::1]:8100", "tcp://[fd00::2]:8100"]


def test_localhost_is_found_by_the_real_resolver():
    found = finish(addresses_of(RouterSource(name=Address("localhost", 8100))))
    assert found[0].host in ("127.0.0.1", "::1")


def test_what_is_no_file_of_addresses_is_no_answer(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("#" * 100_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("pipe", "large", "bytes", "nothing", "."):
        source = parse_router(f"file:{tmp_path / name}")
        assert isinstance(source, RouterSource)
        with pytest.raises((OSError, InvalidConfig, UnicodeError)):
            finish(addresses_of(source))
