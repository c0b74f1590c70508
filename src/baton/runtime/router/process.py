"""The router process: a front without an instance of its own. HTTP and tokenizer on one side, instances on the other.

    clients --HTTP--> ROUTER <--sessions (link.py)-- instances, which dial

Until the first instance joins, it only answers that it is not ready: context, vocabulary and sampling defaults come from that
instance. When all are lost it keeps running: /health and /ready fail, requests wait a while and then get 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette

from baton.addresses import parse_address
from baton.api.app import make_app
from baton.api.config import api_config_of, limits_of
from baton.api.http.server import make_server
from baton.api.http.startup_app import Reception
from baton.api.http.tls import tls_context
from baton.api.routes.cluster import cluster_route
from baton.config import shown, wire_config
from baton.config.router_process import RouterProcessConfig
from baton.core.cluster.events import StopAdmission
from baton.core.cluster.router import Router
from baton.errors import EngineError
from baton.observe.cluster_metrics import ClusterCollector
from baton.observe.logs import configure
from baton.protocol.control import StartFailed
from baton.protocol.instance import InstanceHello, RouterListening
from baton.runtime.credentials import credentials_of
from baton.runtime.front.process import (
    allow_many_files,
    drain,
    listen_on,
    listen_to_supervisor,
    load_text,
    seconds_left,
)
from baton.runtime.processes.build_info import own_build
from baton.runtime.processes.children import begin_child, freeze_gc_heap
from baton.runtime.processes.loop_lag import LoopLag
from baton.runtime.processes.process_table import CONTROL
from baton.runtime.router.router_client import RouterClient
from baton.runtime.router.served import follow, model_of, unservable
from baton.runtime.wire.channel import Channel
from baton.runtime.wire.link import Link
from baton.runtime.wire.link_server import LinkServer, listen_at
from baton.runtime.wire.listener import listen
from baton.text.loading import ModelText, read_template

logger = logging.getLogger("baton.router")

SESSIONS_BEYOND_MAX = 16
"""Number of sessions beyond the instances that may join: one too many is refused with a reason, and not only closed."""
VIEW_SECONDS = 0.5
"""Interval of views sent to the parent process."""


class RouterProcess:
    def __init__(self, config: RouterProcessConfig, supervisor: Channel) -> None:
        self._config = config
        self._supervisor = supervisor
        self._wire = wire_config(config.serve.wire)
        self._credentials = credentials_of(config)
        machine = Router(config.router)
        self._client = RouterClient(machine, config.router, wire=self._wire, credentials=self._credentials)
        self._client.instances.unservable = unservable
        self._links: LinkServer | None = None
        self._lag = LoopLag()
        self._hangs: dict[str, int] = {}
        "Counts of hangs, as the parent process sent them."
        self._sessions: dict[asyncio.Task[None], None] = {}
        self._view_timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Run until stopped. Raises the error if it cannot start, or fails."""
        serve, client = self._config.serve, self._client
        tls = tls_context(serve)
        listeners = listen_on(serve)  # before anything is loaded, so that a port that is in use is reported at once
        links = self._links = LinkServer(
            listen_at(parse_address(self._config.listen)),
            self._credentials,
            self._on_link,
            sessions_max=self._config.router.instances_max + SESSIONS_BEYOND_MAX,
            wire=self._wire,
        )
        links.on_refused = self._on_refused
        template = read_template(serve.chat_template) if serve.chat_template else None
        startup_app = Reception("no instance has joined yet: try again later")
        server = make_server(startup_app, limits=limits_of(serve), lifespan="off", tls=tls, root_path=serve.root_path)
        for sock in listeners:
            listen(sock, server.config.backlog)
        serving = asyncio.create_task(server.serve(sockets=listeners))
        meeting = asyncio.create_task(links.serve())
        stop, hurry = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: (hurry if stop.is_set() else stop).set())
        stopping = asyncio.create_task(stop.wait())
        gone = asyncio.create_task(listen_to_supervisor(self._supervisor, self._hangs))
        starting = asyncio.create_task(self._start(startup_app, template))
        ends: set[asyncio.Future[Any]] = {serving, meeting, stopping, gone, client.over}
        try:
            done, _ = await asyncio.wait({*ends, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting in done:
                starting.result()
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (client.over, meeting):
                if task in done:
                    task.result()
            seconds = serve.drain_seconds_max
            if stopping in done and isinstance(startup_app.app, Starlette):
                startup_app.app.state.front.leaving = True
                seconds = await seconds_left(seconds, asyncio.sleep(serve.shutdown_delay), hurry, ends - {stopping})
            client.dispatch(StopAdmission())
            await drain(server, serving, client, seconds, hurry)
        finally:
            starting.cancel()
            meeting.cancel()
            stopping.cancel()
            gone.cancel()
            server.should_exit = server.force_exit = True
            if self._view_timer is not None:
                self._view_timer.cancel()
            client.close()
            if isinstance(startup_app.app, Starlette):
                startup_app.app.state.front.close()
            for task in self._sessions:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await meeting

    async def _start(self, startup_app: Reception, template: str | None) -> None:
        """Wait for the first instance, and serve from then on."""
        serve, seconds = self._config.serve, self._config.serve.start_seconds_max
        text = await asyncio.to_thread(load_text, serve.model, template)
        self._supervisor.send(RouterListening())
        first = self._client.instances.first
        done, _ = await asyncio.wait([first], timeout=seconds)
        if not done:  # an instance may load, or download, for longer: until then only /live answers, the rest is 503
            logger.warning("no instance has joined within %g s (start_seconds_max): still waiting", seconds)
        hello = await asyncio.shield(first)
        startup_app.app = self._app(text, hello)
        freeze_gc_heap()
        self._supervisor.send(hello.ready)
        self._send_view()

    def _app(self, text: ModelText, hello: InstanceHello) -> Starlette:
        config, client = self._config, self._client
        settings = {"serve": shown(config.serve), "router": {**asdict(config.router), "name": client.name}}
        collector = ClusterCollector(client.view, self._session_counts)
        client.on_handoff = collector.handoff_seconds.observe
        served, instances = hello.ready, client.instances
        app = make_app(
            client,
            text.tokenizer,
            text.chat_template,
            model_of(config.serve, served),
            api_config_of(config.serve, settings),
            routes=[cluster_route(client.view)],
            collector=collector,
        )

        def on_changed() -> None:
            nonlocal served
            served = follow(app.state.front, config.serve, served, instances)

        lag = self._lag
        app.state.front.metrics.about_process("router", lambda: lag.seconds, own_build(), self._hangs)
        client.orders.on_identity = lambda identity: on_changed()
        instances.on_changed = on_changed
        on_changed()  # others may have joined since the first
        return app

    def _session_counts(self) -> dict[str, int]:
        counts = {} if self._links is None else {**self._links.counts}
        return counts | {"malformed": counts.get("malformed", 0) + self._client.instances.malformed}

    def _on_link(self, link: Link, peer: str) -> None:
        task = asyncio.create_task(self._client.serve_instance(link))
        self._sessions[task] = None
        task.add_done_callback(lambda task: self._sessions.pop(task, None))

    def _on_refused(self, host: str, reason: str) -> None:
        self._client.instances.refusals.note(host, reason, asyncio.get_running_loop().time())

    def _send_view(self) -> None:
        self._supervisor.send(self._client.view())
        self._view_timer = asyncio.get_running_loop().call_later(VIEW_SECONDS, self._send_view)


async def serve(config: RouterProcessConfig, sockets: dict[str, socket.socket]) -> None:
    supervisor = await Channel.open(sockets[CONTROL])
    try:
        await RouterProcess(config, supervisor).run()
    except (EngineError, OSError, ValueError) as error:
        supervisor.send(StartFailed(str(error) or type(error).__name__))
        await supervisor.finish()
        sys.exit(1)


def main() -> None:
    config, sockets = begin_child(RouterProcessConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure("router", config.serve.log_level, config.serve.log_format)
    allow_many_files()
    asyncio.run(serve(config, sockets))
