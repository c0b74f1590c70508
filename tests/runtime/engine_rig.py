"""The engine of the tests: a real one on this loop, with real processes below it that have no model."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from chaos_server import Process, until

from baton.config import EngineConfig, InstanceConfig, KVConfig, SchedulerConfig, WorkerConfig
from baton.protocol.control import InstanceReady, InstanceStats, RefusedRequest
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.runtime.engine.process import Engine
from baton.runtime.processes.child import Child
from baton.runtime.processes.process_table import ENGINE_CHILDREN, with_modules
from baton.runtime.wire.channel import Channel


class FakeWorkerEngine(Engine):
    rows = with_modules(ENGINE_CHILDREN, worker="fake_worker", cache="fake_cache")


class Rig:
    """An engine, and the two that talk to it. `engine`: changes of its EngineConfig; `blocks`: given, or to be found out.
    `model`: with it the real worker and the real cache service run. `worker`: changes of its WorkerConfig."""

    def __init__(
        self,
        orders: dict[str, Any] | None = None,
        *,
        engine: dict[str, Any] | None = None,
        blocks: int | None = None,
        kv: KVConfig | None = None,
        model: str = "",
        ranks: int = 1,
        worker: dict[str, Any] | None = None,
        **scheduler: Any,
    ) -> None:
        settings = {"slots": 4, "tokens_per_step": 16, "step_seconds_max": 30.0, "worker_start_seconds_max": 30.0}
        self._config = EngineConfig(
            instance=InstanceConfig(kv=kv or KVConfig(), scheduler=SchedulerConfig(**{**settings, **scheduler})),
            worker=WorkerConfig(
                **{"slots": 4, "block_size": 4, "threads": 1, **(worker or {})},
                model=model or json.dumps(orders or {}),
                blocks=blocks,
                ranks=ranks,
            ),
            **(engine or {}),
        )
        self._engine_type = Engine if model else FakeWorkerEngine
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.refused: dict[str, str] = {}
        self.messages: list[Any] = []
        self.stats = InstanceStats()
        self.workers: list[Process] = []
        self.waits = True
        "Whether entering it waits for the start to be over."
        self.has_front = True
        "Without one only its routers reach the engine."

    async def __aenter__(self) -> Rig:
        pairs = [socket.socketpair() for _ in range(2)]
        self.front, self.supervisor = [await Channel.open(ours) for ours, _ in pairs]
        self._ends = [await Channel.open(theirs) for _, theirs in pairs]
        front, supervisor = self._ends
        self.engine = self._engine_type(self._config, front if self.has_front else None, supervisor)
        self.running = asyncio.create_task(self.engine.run())
        self._reading = asyncio.create_task(self._read())
        if self.waits and self.has_front:
            await self.until(lambda: self.saw(InstanceReady))
        return self

    async def __aexit__(self, *_: object) -> None:
        (self.front if self.has_front else self.supervisor).close()
        await asyncio.wait([self.running])
        self.front.close()
        await asyncio.wait_for(self._reading, 20)
        for channel in (self.supervisor, *self._ends):
            channel.close()
        await asyncio.sleep(0)
        for worker in self.workers:
            until(lambda worker=worker: not worker.alive, "no worker outlives its engine", 20)

    async def _read(self) -> None:
        while (message := await self.front.receive()) is not None:
            self.messages.append(message)
            self._note_worker()
            match message:
                case InstanceStats():
                    self.stats = message
                case RefusedRequest(request, refused):
                    self.refused[request] = refused.reason
                case Emit(tokens, ended):
                    for request, _, _, _, token in each_token(tokens):
                        self.tokens.setdefault(request, []).append(token)
                    self.ended |= {end.request: end for end in ended}

    def _note_worker(self) -> None:
        worker: Child | None = self.engine._worker
        for rank in () if worker is None else worker.ranks:
            if rank.process.pid not in [known.pid for known in self.workers]:
                self.workers.append(Process(rank.process.pid))

    def saw(self, kind: type) -> bool:
        return any(type(message) is kind for message in self.messages)

    async def until(self, question: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):
            while not question():
                assert not self.running.done() or not self.running.exception(), self.running.exception()
                self._note_worker()
                await asyncio.sleep(0.01)

    def ask(self, name: str, prompt: int = 5, max_tokens: int = 12, **changes: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.front.send(GenerateRequest(id=RequestId(name), prompt=(1,) * prompt, sampling=sampling, **changes))

    async def answer(self, name: str, **changes: Any) -> list[int]:
        self.ask(name, **changes)
        await self.until(lambda: name in self.ended)
        return self.tokens[name]
