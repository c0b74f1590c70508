"""A router serves the model of the instances that are connected, and an instance whose model it cannot serve ends nothing but
its own session."""

from __future__ import annotations

import asyncio
import math
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_rig import READY, FakeInstance
from msgspec.structs import replace
from run_loop import finish

from baton.api.http.startup_app import Reception
from baton.config import RouterConfig, ServeConfig
from baton.config.router_process import RouterProcessConfig
from baton.protocol.control import InstanceReady
from baton.protocol.instance import Heartbeat, InstanceRefused
from baton.runtime.router import process as module
from baton.runtime.router.process import RouterProcess
from baton.runtime.wire.channel import Channel
from baton.trust.secret import create_secret

TEXT = SimpleNamespace(
    tokenizer=SimpleNamespace(vocab_size=300, eos_ids=(1,), added_ids={}, id_to_bytes=lambda token: b"x"),
    chat_template=SimpleNamespace(sources=()),
)


class Served:
    def __init__(self, router: RouterProcess, reception: Reception, starting: asyncio.Task[None]) -> None:
        self.router, self._reception, self.starting = router, reception, starting

    async def dial(self, name: str, ready: InstanceReady) -> FakeInstance:
        ours, theirs = socket.socketpair()
        instance = FakeInstance(await Channel.open(ours), name, "mixed", ready)
        instance.serving = asyncio.create_task(self.router._client.serve_instance(await Channel.open(theirs)))
        return instance

    @property
    def front(self) -> Any:
        return self._reception.app.state.front


@asynccontextmanager
async def router(tmp_path: Any):
    create_secret(tmp_path / "secret")
    config = RouterProcessConfig(
        serve=ServeConfig(model=str(tmp_path)),
        router=RouterConfig(no_instance_seconds=0.05),
        listen=f"unix:{tmp_path}/router.sock",
        cluster_secret=str(tmp_path / "secret"),
    )
    ours, theirs = socket.socketpair()
    supervisor = await Channel.open(ours)
    process, reception = RouterProcess(config, supervisor), Reception("not yet")
    starting = asyncio.create_task(process._start(reception, None))
    served = Served(process, reception, starting)
    try:
        yield served
    finally:
        starting.cancel()
        if process._view_timer is not None:
            process._view_timer.cancel()
        process._client.close()
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            served.front.close()
        supervisor.close()
        theirs.close()
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_text", lambda *_: TEXT)
    monkeypatch.setattr(module, "freeze_gc_heap", lambda: None)


ODD = {
    "no context": replace(READY, context_tokens=0),
    "a context of one token": replace(READY, context_tokens=1),
    "a temperature below 0": replace(READY, sampling_defaults={"temperature": -3.0}),
    "a temperature that is no number": replace(READY, sampling_defaults={"temperature": math.nan}),
    "half a token": replace(READY, sampling_defaults={"max_tokens": 2.5}),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("first", [True, False])
def test_an_instance_whose_model_cannot_be_served_is_refused_and_the_router_goes_on(case: str, first: bool, tmp_path: Any):
    """As the first instance it ended the router, and each time it dialled again the next router."""

    async def run() -> None:
        async with router(tmp_path) as served:
            if not first:
                await (await served.dial("good", READY)).join()
                await served.starting
            odd = await served.dial("odd", ODD[case])
            odd.send(odd.hello)
            refused = await odd.heard(InstanceRefused)
            assert "cannot be served" in refused.reason
            if first:
                await (await served.dial("good", READY)).join()
                await served.starting
            assert [each.hello.name for each in served.router._client.sessions] == ["good"]
            assert served.front.model.context_tokens == READY.context_tokens
            assert [each.name for each in served.router._client.view().refused] == ["odd"]

    finish(run())


def test_sampling_defaults_that_only_a_later_version_knows_are_left_out(tmp_path: Any):
    async def run() -> None:
        async with router(tmp_path) as served:
            later = replace(READY, sampling_defaults={"temperature": 0.5, "a_new_sampler": 3})
            await (await served.dial("later", later)).join()
            await served.starting
            assert served.front.model.sampling_defaults == {"temperature": 0.5}

    finish(run())


def test_when_all_instances_are_replaced_by_others_these_are_served(tmp_path: Any):
    """Vocabulary, defaults and fingerprint stayed those of the first instance that had ever joined."""

    async def run() -> None:
        async with router(tmp_path) as served:
            stray = await served.dial("stray", replace(READY, vocab_size=5, sampling_defaults={"temperature": 0.1}))
            await stray.join()
            await served.starting
            before = served.front.model
            await stray.leave()
            assert served.front.model is before, "while none is connected nothing changes"
            await asyncio.sleep(0.1)  # no_instance_seconds
            other = replace(READY, identity=b"others", sampling_defaults={"temperature": 0.7}, context_tokens=256)
            await (await served.dial("other", other)).join()
            model = served.front.model
            assert (model.head_width, model.context_tokens) == (300, 256)
            assert model.sampling_defaults == {"temperature": 0.7}
            assert model.fingerprint != before.fingerprint
            options = served.front.schema.completion({"model": model.name, "prompt": "a"}).options
            assert options.sampling.temperature == 0.7

    finish(run())


def test_a_second_instance_with_other_defaults_changes_nothing(tmp_path: Any):
    async def run() -> None:
        async with router(tmp_path) as served:
            await (await served.dial("one", replace(READY, sampling_defaults={"temperature": 0.1}))).join()
            await served.starting
            other = replace(READY, sampling_defaults={"temperature": 0.7}, context_tokens=256)
            await (await served.dial("two", other)).join()
            assert served.front.model.sampling_defaults == {"temperature": 0.1}
            assert served.front.model.context_tokens == 256

    finish(run())


def test_a_fault_is_shown_as_one_line_of_printable_text(tmp_path: Any):
    """It is printed by `baton up` and `baton router`, where a line feed forged a line."""

    async def run() -> None:
        async with router(tmp_path) as served:
            instance = await served.dial("one", READY)
            await instance.join()
            await served.starting
            instance.send(Heartbeat("hot\nbaton up: all is well\x1b[2J"))
            client = served.router._client
            async with asyncio.timeout(10):
                while not client.sessions[0].beat.fault:
                    await asyncio.sleep(0)
            assert client.view().instances[0].fault == "hot\\nbaton up: all is well\\x1b[2J"

    finish(run())
