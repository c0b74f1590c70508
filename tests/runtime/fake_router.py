"""A router without a machine: takes the sessions that come, notes what it is told, and says what a test wants.

As a program (`python -m fake_router SECRET_FILE`) it prints its port and takes everybody in, until its stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any

from baton.addresses import Address
from baton.errors import LinkFailed
from baton.protocol.codec import Message
from baton.protocol.control import InstanceStats, OrderAnswer, Pong, RefusedRequest
from baton.protocol.ids import RequestId
from baton.protocol.instance import Heartbeat, InstanceHello, InstanceRefused, RouterHeartbeat, RouterHello
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.runtime.wire.link import Link
from baton.runtime.wire.link_server import LinkServer, listen_at
from baton.trust.secret import Secret, read_secrets


class Visit:
    """One session of one instance."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.hello: InstanceHello | None = None
        self.messages: list[Message] = []
        self.tokens: dict[str, list[int]] = {}
        self.positions: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.refused: dict[str, str] = {}
        self.over = False

    def take(self, message: Message) -> None:
        self.messages.append(message)
        match message:
            case InstanceHello():
                self.hello = message
            case RefusedRequest(request, refused):
                self.refused[request] = refused.reason
            case Emit(tokens, ended):
                for request, _, _, position, token in each_token(tokens):
                    self.positions.setdefault(request, []).append(position)
                    self.tokens.setdefault(request, []).append(token)
                self.ended |= {end.request: end for end in ended}

    def tokens_from(self, request: str, position: int) -> list[int]:
        """All of its tokens, which must be those from that position on, each once."""
        tokens = self.tokens.get(request, [])
        assert self.positions.get(request, []) == list(range(position, position + len(tokens)))
        return tokens

    def all(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if type(message) is kind]

    @property
    def beats(self) -> list[Heartbeat]:
        return self.all(Heartbeat)

    @property
    def stats(self) -> InstanceStats:
        return self.all(InstanceStats)[-1]

    def pong(self, number: int) -> Pong | None:
        return next((pong for pong in self.all(Pong) if pong.number == number), None)

    def answer(self, number: int) -> OrderAnswer | None:
        return next((answer for answer in self.all(OrderAnswer) if answer.number == number), None)

    def ask(self, name: str, prompt: int = 5, max_tokens: int = 12, **changes: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.link.send(GenerateRequest(id=RequestId(name), prompt=(1,) * prompt, sampling=sampling, **changes))


class FakeRouter:
    """`refusal`: not empty, every instance is refused with it. `greets`: whether it answers a hello at all."""

    def __init__(self, secret: Secret, refusal: str = "", lapse_seconds: float = 2.0, name: str = "router-1") -> None:
        self._secret = secret
        self.refusal = refusal
        self.retry_seconds = 0.0
        "Of refusals."
        self.beats = True
        self.greets = True
        self.capabilities: tuple[str, ...] = ()
        "As in its hello. Empty: as builds before capabilities."
        self.beat_seconds = 0.25
        self._lapse_seconds = lapse_seconds
        self._name = name
        self.visits: list[Visit] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FakeRouter:
        sock = listen_at(Address(host="127.0.0.1"))
        self.address = Address(*sock.getsockname())
        self.server = LinkServer(sock, self._secret, lambda link, peer: self._spawn(self._serve(link)))
        self._spawn(self.server.serve())
        self._spawn(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for visit in self.visits:
            visit.link.close()
        await asyncio.sleep(0.01)

    def _spawn(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _serve(self, link: Link) -> None:
        visit = Visit(link)
        self.visits.append(visit)

        def take(message: Message) -> None:
            visit.take(message)
            if type(message) is InstanceHello and self.greets:
                hello = RouterHello(self._name, self.beat_seconds, self._lapse_seconds, self.capabilities)
                link.send(InstanceRefused(self.refusal, self.retry_seconds) if self.refusal else hello)

        with contextlib.suppress(LinkFailed):
            await link.listen(take)
        visit.over = True

    async def _beat(self) -> None:
        while True:
            for visit in self.visits:
                if self.beats and not visit.over:
                    visit.link.send(RouterHeartbeat())
            await asyncio.sleep(0.1)

    @property
    def open(self) -> list[Visit]:
        return [visit for visit in self.visits if not visit.over]

    async def visit(self, question: Callable[[Visit], bool] = lambda visit: bool(visit.beats)) -> Visit:
        """The session that is open now, once it is as asked: taken in, if nothing is."""
        async with asyncio.timeout(40):
            while not (self.open and question(self.open[-1])):
                await asyncio.sleep(0.01)
        return self.open[-1]


async def main() -> None:
    async with FakeRouter(read_secrets(sys.argv[1]).secrets[0]) as router:
        print(router.address.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
