"""What is wrong in the router itself: nobody waits for ever, and nobody else pays for one request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from client_pair import Asked, request
from cluster_rig import READY, Cluster
from msgspec.structs import replace
from run_loop import finish

from baton.api.generate.engine_client import Delta
from baton.config import RouterConfig, WireConfig
from baton.core.cluster.events import ClusterEvent, Deliver, InstanceMessage, SubmitRequest
from baton.errors import Unavailable
from baton.protocol.codec import FRAME_BYTES_MAX, MessageTooLarge
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest
from baton.runtime.router.instance_session import InstanceSession
from baton.runtime.router.instance_set import InstanceSet
from baton.runtime.router.router_client import RouterClient
from baton.runtime.wire.channel import Channel


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
def test_a_request_too_large_for_a_frame_fails_alone_and_the_machine_forgets_it(roles):
    async def main() -> None:
        async with Cluster(withdraw_seconds_max=0.01) as cluster, asyncio.timeout(20):
            for place, role in enumerate(roles):
                await cluster.instance(f"{role}-{place}", role)
            large = GenerateRequest(id=RequestId("large"), prompt=(1, 2, 3), salt=bytes(FRAME_BYTES_MAX))
            with pytest.raises(MessageTooLarge):
                await Asked(cluster.client, large).over
            while not cluster.machine.idle:  # it waits a moment for the instance to tell the end
                await asyncio.sleep(0.005)

    finish(main())


def test_a_message_that_the_machine_cannot_handle_ends_its_own_session_and_nothing_else(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            odd, honest = await cluster.instance("odd"), await cluster.instance("honest")
            handle = cluster.machine.handle

            def broken(event: ClusterEvent, now: Instant) -> object:
                if isinstance(event, InstanceMessage) and event.message == Heartbeat("on\npurpose"):
                    raise ZeroDivisionError("what nobody foresaw")
                return handle(event, now)

            fake = SimpleNamespace(handle=broken, next_deadline=cluster.machine.next_deadline)
            cluster.client._driver.machine = fake  # type: ignore[assignment]
            asked = Asked(cluster.client, request())
            odd.send(Heartbeat("on\npurpose"))
            while [node.hello.name for node in cluster.client.sessions] != ["honest"]:
                await asyncio.sleep(0.005)
            there = await honest.heard(GenerateRequest)
            honest.send(Emit([(there.id, there.attempt, 0, 0, [5])], [whole_end(there)]))
            await asked.over
            assert asked.tokens == [5]
            assert cluster.client.view().counters["sessions_malformed"] == 1
            (line,) = [record.getMessage() for record in caplog.records if "what nobody foresaw (" in record.getMessage()]
            assert line.startswith("instance odd: malformed: ZeroDivisionError")

    finish(main())


def whole_end(there: GenerateRequest) -> Ended:
    return Ended(there.id, 0, FinishReason.LENGTH, 3, 0, 1, 0, attempt=there.attempt)


def test_a_first_message_that_is_no_hello_is_counted():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            odd = await cluster.connect("odd")
            odd.send(Heartbeat())
            await odd.serving
            assert cluster.client.view().counters["sessions_malformed"] == 1

    finish(main())


def test_a_hello_that_nothing_foresaw_ends_its_own_session_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            await cluster.instance("honest")
            join = InstanceSet._join

            def broken(instances: InstanceSet, hello: InstanceHello, channel: Channel) -> InstanceSession:
                if hello.name == "odd":
                    raise ZeroDivisionError("what nobody foresaw")
                return join(instances, hello, channel)

            monkeypatch.setattr(InstanceSet, "_join", broken)
            odd = await cluster.connect("odd")
            odd.send(odd.hello)
            await odd.serving
            assert cluster.client.view().counters["sessions_malformed"] == 1
            assert [node.hello.name for node in cluster.client.sessions] == ["honest"]

    finish(main())


def test_a_failure_of_the_machine_ends_every_request_with_an_error():
    async def main() -> None:
        cluster = await Cluster().__aenter__()
        async with asyncio.timeout(20):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            there = await one.heard(GenerateRequest)

            def broken(*event: object) -> None:
                raise ValueError("on purpose")

            cluster.client._driver.machine = SimpleNamespace(handle=broken)  # type: ignore[assignment]
            one.send(Emit([(there.id, 1, 0, 0, [5])], [Ended(there.id, 0, FinishReason.LENGTH, 3, 0, 1, 0)]))
            with pytest.raises(Unavailable, match="the router failed"):
                await asked.over
            with pytest.raises(Unavailable, match="the router failed"):
                await Asked(cluster.client, request(RequestId("b"))).over
            with pytest.raises(ValueError, match="on purpose"):
                await cluster.client.over
            await one.leave()
            cluster.client.close()

    finish(main())


def test_what_a_delivery_sets_off_waits_until_its_effects_are_carried_out():
    """Whoever is told a token may withdraw the request at once. The rest of what the machine wanted done comes first."""
    log: list[object] = []

    class Machine:
        idle = False

        def handle(self, event: ClusterEvent, now: float) -> list[Deliver]:
            log.append(type(event).__name__)
            if not isinstance(event, SubmitRequest):
                return []
            return [Deliver(Emit([(event.request.id, 1, 0, place, [5 + place])], [])) for place in range(2)]

        def next_deadline(self) -> None:
            return None

    async def main() -> None:
        client = RouterClient(Machine(), RouterConfig())  # type: ignore[arg-type]

        def take(delta: Delta) -> None:
            log.append(delta.tokens[0])
            if delta.tokens == [5]:
                client.abort(RequestId("a"))

        asking = asyncio.ensure_future(client.generate(request(), take))
        await asyncio.sleep(0)
        assert log == ["SubmitRequest", 5, 6, "WithdrawRequest"]
        asking.cancel()
        await asyncio.wait([asking])
        client.close()

    finish(main())


def test_one_that_connects_and_says_no_hello_is_closed():
    async def main() -> None:
        async with Cluster(WireConfig(session_hello_seconds=0.02)) as cluster:
            silent = await cluster.connect("m-0")
            assert silent.serving is not None
            await asyncio.wait_for(asyncio.shield(silent.serving), 20)
            assert await asyncio.wait_for(silent.channel.receive(), 20) is None

    finish(main())


def test_an_instance_that_is_refused_again_and_again_is_one_line_a_minute(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            await cluster.instance("m-0")
            for _ in range(5):
                stray = await cluster.connect("stray", ready=replace(READY, identity=b"other"))
                await cluster.refused(stray)
            lines = [record.getMessage() for record in caplog.records if "stray" in record.getMessage()]
            assert len(lines) == 1
            assert "instance stray is refused: " in lines[0]
            assert cluster.machine.stats.instances_refused == 5

    finish(main())
