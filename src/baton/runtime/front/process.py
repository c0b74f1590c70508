"""The front process: HTTP, tokenizer and chat template on one side, the engine's channel on the other."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import time
from collections.abc import Collection, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from baton.api.app import make_app
from baton.api.config import ServedModel, api_config_of
from baton.api.http.server import make_server
from baton.api.http.shutdown import shutting_down
from baton.api.http.tls import tls_context
from baton.config import ANY_NAME, ServeConfig, shown
from baton.config.device_defaults import OPTIONS
from baton.errors import EngineError, Unavailable
from baton.observe.logs import configure
from baton.protocol.codec import Message
from baton.protocol.control import ChildHangs, InstanceReady, StartFailed
from baton.runtime.front.client import ChannelClient
from baton.runtime.front.fingerprint import system_fingerprint
from baton.runtime.processes.build_info import own_build
from baton.runtime.processes.children import begin_child, freeze_gc_heap
from baton.runtime.processes.loop_lag import LoopLag
from baton.runtime.processes.process_table import CONTROL, DESCRIPTORS
from baton.runtime.processes.silence_watch import answer_parent
from baton.runtime.wire.channel import Channel
from baton.runtime.wire.descriptors import receive_descriptor
from baton.runtime.wire.listener import bind, listen
from baton.text.loading import ModelText, load_model_text, read_template

ANSWER_SECONDS = 2.0
"""Seconds in which clients receive the end of requests that are ended."""
FILES_MAX = 16_384


async def serve(config: ServeConfig, sockets: dict[str, socket.socket]) -> None:
    """Run the front: wait for the engine, serve HTTP until a signal or the end of a channel, then drain and end."""
    engine_channel, supervisor = await Channel.open(sockets["engine"]), await Channel.open(sockets[CONTROL])
    hangs: dict[str, int] = {}
    supervisor_gone = asyncio.create_task(listen_to_supervisor(supervisor, hangs))
    client = ChannelClient(engine_channel)
    # If the start fails for another reason, this future is not awaited, and its error is not logged.
    client.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
    engine_gone = asyncio.create_task(client.read(partial(_next_engine, sockets[DESCRIPTORS]), config.start_seconds_max))
    try:
        tls = tls_context(config)
        listeners = listen_on(config)  # before the model is loaded, so that a port that is in use is reported at once
        template = read_template(config.chat_template) if config.chat_template else None
        text = await asyncio.to_thread(load_text, config.model, template)
        ready = await _ready(client, config.start_seconds_max)
        app = _app(config, client, text, ready)
        lag = LoopLag()
        app.state.front.metrics.about_process("front", lambda: lag.seconds, own_build(), hangs)

        def on_identity(identity: bytes) -> None:
            front = app.state.front
            front.model = replace(front.model, fingerprint=system_fingerprint(config, identity))

        client.on_identity = on_identity
        # Without lifespan: a forced end would cancel it, with a traceback; closed below.
        server = make_server(app, lifespan="off", tls=tls, root_path=config.root_path)
        for sock in listeners:
            listen(sock, server.config.backlog)  # from here on no client is refused, so `ready` may be sent
    except (EngineError, OSError, ValueError) as error:
        supervisor.send(StartFailed(str(error) or type(error).__name__))
        await supervisor.finish()
        sys.exit(1)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    stop, hurry = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: (hurry if stop.is_set() else stop).set())
    stopping = asyncio.create_task(stop.wait())
    freeze_gc_heap()
    supervisor.send(ready)
    await asyncio.wait([serving, engine_gone, stopping, supervisor_gone], return_when=asyncio.FIRST_COMPLETED)
    seconds = config.drain_seconds_max
    if stopping.done() and not engine_gone.done():
        app.state.front.leaving = True
        before = drain_for_routers(client, seconds) if config.routers else asyncio.sleep(config.shutdown_delay)
        seconds = await seconds_left(seconds, before, hurry, {serving, engine_gone})
    await drain(server, serving, client, 0.0 if engine_gone.done() else seconds, hurry)
    app.state.front.close()
    if engine_gone.done():
        try:
            engine_gone.result()
        except EngineError as error:  # no other engine came; any other error is a bug, and raises
            supervisor.send(StartFailed(str(error)))
            await supervisor.finish()
        sys.exit(1)
    await client.finish()


async def _next_engine(link: socket.socket) -> Channel | None:
    """Wait for the channel to the engine that follows a lost one. The supervisor starts it, and sends its socket."""
    received = await receive_descriptor(link)
    return None if received is None else await Channel.open(socket.socket(fileno=received[1]))


def load_text(model: str, template: str | None) -> ModelText:
    text = load_model_text(model, chat_template=template)
    text.tokenizer.prepare_plain()  # imported now, and not in the first request that needs it: that takes a fifth of a second
    return text


def listen_on(config: ServeConfig) -> list[socket.socket]:
    """Bind the listeners of one app: api/http/access.py decides by the port what a connection may reach."""
    listeners = [bind(config.host, config.port)]
    if config.admin_port is not None:
        listeners.append(bind(config.admin_host, config.admin_port))
    return listeners


async def _ready(client: ChannelClient, seconds: float) -> InstanceReady:
    try:
        return await asyncio.wait_for(client.ready, seconds)
    except TimeoutError:
        raise Unavailable(f"the model was not ready within {seconds:g} s (start_seconds_max)") from None


async def drain_for_routers(client: ChannelClient, seconds: float) -> None:
    """Drain an instance of a cluster while its own HTTP still answers: health and metrics are of interest meanwhile."""
    with contextlib.suppress(EngineError):  # the engine was lost
        await client.pause(seconds)


async def seconds_left(
    seconds: float, before: Coroutine[Any, Any, object], hurry: asyncio.Event, ends: Collection[asyncio.Future[Any]]
) -> float:
    """Perform what precedes a drain, until the second signal or one of `ends`. Returns the seconds left for the drain."""
    loop = asyncio.get_running_loop()
    begun, first, hurried = loop.time(), asyncio.create_task(before), asyncio.create_task(hurry.wait())
    await asyncio.wait({first, hurried, *ends}, timeout=seconds + ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in (first, hurried):
        task.cancel()
    return max(0.0, seconds - (loop.time() - begun))


class EndsRequests(Protocol):
    def end_requests(self, why: Exception) -> None: ...


async def drain(
    server: uvicorn.Server, serving: asyncio.Task[None], client: EndsRequests, seconds: float, hurry: asyncio.Event
) -> None:
    """Let running requests finish, at most `seconds` or until the second signal. Then they end with an error that names the
    shutdown."""
    server.should_exit = True
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({serving, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    client.end_requests(shutting_down())
    await asyncio.wait({serving}, timeout=ANSWER_SECONDS)
    # the remaining requests wait for their clients; the end of the loop cancels them (api/http/shutdown.py)
    server.force_exit = True
    await asyncio.wait({serving}, timeout=ANSWER_SECONDS)


async def listen_to_supervisor(supervisor: Channel, hangs: dict[str, int]) -> None:
    """Answer the supervisor's pings, and keep its counts of hangs, until its channel ends."""

    def on_message(message: Message) -> None:
        if type(message) is ChildHangs:
            hangs.update(message.counts)

    await answer_parent(supervisor, on_message)


def _app(config: ServeConfig, client: ChannelClient, text: ModelText, ready: InstanceReady) -> Starlette:
    settings = {
        "serve": shown(config) | {name: ready.plan[name] for name in OPTIONS if name in ready.plan},
        "instance": {"kv_blocks": ready.blocks, "block_size": ready.block_size, "max_num_seqs": ready.slots},
        "plan": ready.plan,
    }
    return make_app(client, text.tokenizer, text.chat_template, served_model(config, ready), api_config_of(config, settings))


def served_model(config: ServeConfig, ready: InstanceReady) -> ServedModel:
    names = [name for name in config.served_model_name if name != ANY_NAME] or [config.model]
    return ServedModel(
        name=names[0],
        aliases=tuple(names[1:]),
        any_name=ANY_NAME in config.served_model_name,
        context_tokens=ready.context_tokens,
        head_width=ready.vocab_size,
        created=int(time.time()),
        sampling_defaults=ready.sampling_defaults,
        pooling=ready.pooling,
        scoring=ready.scoring,
        generates=ready.generates,
        labels=ready.labels,
        fingerprint=system_fingerprint(config, ready.identity),
        weights=ready.identity_parts.get("weights", ""),
        weights_bytes=weights_bytes(Path(config.model)),
    )


def weights_bytes(model: Path) -> int:
    """Size of the weight files of a .gguf file or a folder. 0 if this machine does not have them."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in ([model] if model.is_file() else model.glob("*.safetensors")))
    return 0


def allow_many_files() -> None:
    """Raise the limit of open files: every connection is one, and many systems allow a process only 1024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    config, sockets = begin_child(ServeConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure("front", config.log_level, config.log_format)
    allow_many_files()
    asyncio.run(serve(config, sockets))
