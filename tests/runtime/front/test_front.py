"""The front process: what it makes of its settings."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.config import ServeConfig
from baton.protocol.control import InstanceReady, InstanceStats
from baton.runtime.front import process as front_process
from baton.runtime.front.fingerprint import SMALL_BYTES, system_fingerprint
from baton.runtime.processes.process_table import CONTROL, DESCRIPTORS
from baton.runtime.wire.channel import Channel

READY = InstanceReady(8, 16, 4, 300, 128, 128, identity=b"of the weights")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(200_000))
    return folder


class Tokens:
    vocab_size = 300
    eos_ids = (1,)
    added_ids: dict[str, int] = {}  # noqa: RUF012

    def id_to_bytes(self, token: int) -> bytes:
        return b"x"


class Engine:
    def stats(self) -> InstanceStats:
        return InstanceStats()


class Template:
    sources = ()


class Text:
    tokenizer = Tokens()
    chat_template = Template()


def made(model, **settings):
    config = ServeConfig(model=str(model), served_model_name=("tiny",), **settings)
    return front_process._app(config, Engine(), Text(), READY)


def test_every_setting_of_the_edge_reaches_the_front(model):
    app = made(
        model, host="0.0.0.0", port=8001, api_key=("a",), admin_api_key=("b",), admin_port=8002, allowed_hosts=("llm.example",),
        allowed_origins=("https://ui.example",), unknown_fields="refuse", client_priority_min=-2,
    )  # fmt: skip
    config = app.state.front.config
    assert (config.api_keys, config.admin_api_keys, config.admin_port, config.host) == (("a",), ("b",), 8002, "0.0.0.0")
    assert (config.allowed_hosts, config.allowed_origins) == (("llm.example",), ("https://ui.example",))
    assert (config.unknown_fields, config.client_priority_min) == ("refuse", -2)
    assert config.settings["serve"]["admin_api_key"] == 1


def test_the_front_closes_its_threads_and_helpers_when_the_process_ends(model, monkeypatch):
    """uvicorn's lifespan would do it and is off in production, so nobody did."""
    closed = []
    real_app = front_process._app

    def watched_app(*given):
        app = real_app(*given)
        front = app.state.front
        front.close, real = lambda: closed.append(True) or real(), front.close
        return app

    monkeypatch.setattr(front_process, "_app", watched_app)
    monkeypatch.setattr(front_process, "load_text", lambda *_: Text())
    monkeypatch.setattr(front_process, "freeze_gc_heap", lambda: None)

    async def run() -> None:
        pairs = {name: socket.socketpair() for name in ("engine", CONTROL, DESCRIPTORS)}
        config = ServeConfig(model=str(model), port=0, drain_seconds_max=0.0)
        serving = asyncio.create_task(front_process.serve(config, {name: pair[0] for name, pair in pairs.items()}))
        engine, supervisor = [await Channel.open(pairs[name][1]) for name in ("engine", CONTROL)]
        engine.send(READY)
        assert await asyncio.wait_for(supervisor.receive(), 20) == READY
        assert closed == []
        supervisor.close()
        await asyncio.wait_for(serving, 20)
        engine.close()
        pairs[DESCRIPTORS][1].close()

    asyncio.run(run())
    assert closed == [True]


def test_what_takes_long_is_made_before_the_first_request(monkeypatch):
    prepared = []
    text = Text()
    text.tokenizer = type("Prepared", (Tokens,), {"prepare_plain": lambda self: prepared.append(True)})()
    monkeypatch.setattr(front_process, "load_model_text", lambda *_, **__: text)
    assert front_process.load_text("model", None) is text
    assert prepared == [True]


def test_both_ports_are_listened_on():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listeners = front_process.listen_on(ServeConfig(port=0, admin_port=port))
    try:
        assert [sock.getsockname()[0] for sock in listeners] == ["127.0.0.1", "127.0.0.1"]
        assert listeners[1].getsockname()[1] == port
    finally:
        for sock in listeners:
            sock.close()


def test_fingerprint_changes_with_what_is_served(model, tmp_path):
    config = ServeConfig(model=str(model))
    first = system_fingerprint(config, b"identity")
    assert first.startswith("fp_")
    assert system_fingerprint(replace(config, port=1, api_key=("k",)), b"identity") == first
    assert system_fingerprint(config, b"another") != first
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    assert system_fingerprint(replace(config, chat_template=str(template)), b"identity") != first
    with (model / "model.onnx").open("wb") as large:
        large.truncate(SMALL_BYTES + 1)
    (model / "model.safetensors").write_bytes(b"are in the identity")
    assert system_fingerprint(config, b"identity") == first
    (model / "tokenizer.json").write_text("{}")
    assert system_fingerprint(config, b"identity") != first


def test_fingerprint_does_not_depend_on_the_place(model, tmp_path):
    moved = tmp_path / "elsewhere"
    model.rename(moved)
    model.mkdir()
    for file in moved.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    assert system_fingerprint(ServeConfig(model=str(model)), b"") == system_fingerprint(ServeConfig(model=str(moved)), b"")


def test_the_models_fingerprint_is_what_clients_see(model):
    config = ServeConfig(model=str(model), served_model_name=("tiny",))
    assert made(model).state.front.model.fingerprint == system_fingerprint(config, READY.identity)


def test_uvicorn_leaves_logging_alone(model):
    before = logging.getLogger("uvicorn.error").handlers[:]
    assert front_process.make_server(made(model)).config.log_config is None
    assert logging.getLogger("uvicorn.error").handlers == before


@pytest.mark.parametrize("end", ["requests end", "second signal", "time is over"])
def test_draining_waits_for_what_runs_until_it_ends_or_nobody_wants_to_wait(end: str):
    async def main() -> None:
        over, hurry, ended = asyncio.Event(), asyncio.Event(), []
        server = SimpleNamespace(should_exit=False, force_exit=False)
        serving = asyncio.create_task(over.wait())
        client = SimpleNamespace(end_requests=lambda why: (ended.append(why), over.set()))
        seconds = 0.01 if end == "time is over" else 60.0
        draining = asyncio.create_task(front_process.drain(server, serving, client, seconds, hurry))
        if end != "time is over":
            for _ in range(5):
                await asyncio.sleep(0)
            assert server.should_exit
            assert not ended
        if end == "requests end":
            over.set()
        elif end == "second signal":
            hurry.set()
        await asyncio.wait_for(draining, 20)
        assert len(ended) == 1

    asyncio.run(main())


@pytest.mark.parametrize("end", ["it is done", "second signal", "the engine is gone", "it takes too long"])
def test_what_precedes_a_drain_is_a_part_of_its_time(monkeypatch, end: str):
    monkeypatch.setattr(front_process, "ANSWER_SECONDS", 0.01)

    async def main() -> None:
        hurry, gone, done = asyncio.Event(), asyncio.get_running_loop().create_future(), asyncio.Event()
        seconds = 0.01 if end == "it takes too long" else 60.0
        waiting = asyncio.create_task(front_process.seconds_left(seconds, done.wait(), hurry, {gone}))
        for _ in range(5):
            await asyncio.sleep(0)
        if end == "it takes too long":
            assert await asyncio.wait_for(waiting, 20) == 0.0
            return
        assert not waiting.done()
        {"it is done": done.set, "second signal": hurry.set}.get(end, lambda: gone.set_result(None))()
        left = await asyncio.wait_for(waiting, 20)
        assert 0.0 < left < 60.0

    asyncio.run(main())
