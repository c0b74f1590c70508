"""An order that takes longer than its route waits goes on: whatever becomes of it, the server serves afterwards."""

from __future__ import annotations

import asyncio

import pytest
from client_pair import Pair
from cluster_rig import Cluster
from run_loop import finish
from test_orders import obey

from baton.api.admin_orders import AdminOrders
from baton.api.errors import ApiError
from baton.errors import Unavailable
from baton.protocol.control import ModelChanged, OrderAnswer, PauseInstance, ResumeInstance, SleepInstance, WakeInstance
from baton.runtime.front import orders as module

RELOAD = (PauseInstance, SleepInstance, WakeInstance, ResumeInstance)


def test_weights_of_one_server_are_served_though_nobody_waits_any_more():
    async def main() -> None:
        async with Pair() as pair, asyncio.timeout(20):
            orders = AdminOrders()
            order = await orders.run("weights", 0.01, pair.client.load_weights("/new", 0.0))
            assert (order.state, orders.view()[0]["state"]) == ("running", "running")
            await obey(pair, *((kind, "done") for kind in RELOAD))
            await order.task
            assert orders.view() == [{"order": 1, "kind": "weights", "state": "done", "error": None}]

    finish(main())


def test_a_route_that_is_cancelled_does_not_take_its_order_along():
    async def main() -> None:
        async with Pair() as pair, asyncio.timeout(20):
            orders = AdminOrders()
            route = asyncio.create_task(orders.run("weights", 60.0, pair.client.load_weights("/new", 0.0)))
            pause = await pair.heard()
            route.cancel()
            await asyncio.wait([route])
            assert isinstance(pause, PauseInstance)
            pair.engine.send(OrderAnswer(pause.number, "done"))
            await obey(pair, *((kind, "done") for kind in RELOAD[1:]))
            while orders.view()[0]["state"] == "running":
                await asyncio.sleep(0.001)
            assert orders.view()[0]["state"] == "done"

    finish(main())


def test_sleep_and_wake_of_one_server_are_done_though_nobody_waits_any_more():
    async def main() -> None:
        async with Pair() as pair, asyncio.timeout(20):
            orders = AdminOrders()
            sleep = await orders.run("sleep", 0.01, pair.client.sleep(0.0))
            assert sleep.state == "running"
            await obey(pair, (PauseInstance, "done"), (SleepInstance, "done"))
            await sleep.task
            wake = await orders.run("wake", 0.01, pair.client.wake())
            assert wake.state == "running"
            await obey(pair, (WakeInstance, "done"), (ResumeInstance, "done"))
            await wake.task
            assert [(order["kind"], order["state"]) for order in orders.view()] == [("wake", "done"), ("sleep", "done")]

    finish(main())


def test_sleep_and_wake_of_a_cluster_are_done_though_nobody_waits_any_more():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            instances = [await cluster.instance("m-0"), await cluster.instance("m-1")]
            sleep = await AdminOrders().run("sleep", 0.01, cluster.client.sleep(None))
            assert sleep.state == "running"
            await asyncio.gather(*(each.obey(PauseInstance, SleepInstance) for each in instances))
            await sleep.task
            assert cluster.client.stats().mode == "asleep"
            wake = await AdminOrders().run("wake", 0.01, cluster.client.wake())
            assert wake.state == "running"
            await asyncio.gather(*(each.obey(WakeInstance, ResumeInstance) for each in instances))
            await wake.task
            assert cluster.client.stats().mode == "serving"

    finish(main())


def test_weights_of_a_cluster_are_served_with_the_new_identity():
    async def main() -> None:
        identities: list[bytes] = []
        async with Cluster() as cluster, asyncio.timeout(20):
            instances = [await cluster.instance("m-0"), await cluster.instance("m-1")]
            cluster.client.orders.on_identity = identities.append
            order = await AdminOrders().run("weights", 0.01, cluster.client.load_weights("/new", None))
            assert order.state == "running"
            assert cluster.client.stats().mode != "serving"
            await asyncio.gather(*(each.obey(*RELOAD, identity=b"new") for each in instances))
            await order.task
            assert (cluster.client.stats().mode, identities) == ("serving", [b"new"])
            late = await cluster.connect("m-2")
            assert "identity" in (await cluster.refused(late)).reason, "the machine knows the new identity"

    finish(main())


def test_an_instance_that_beats_and_never_answers_is_given_up_and_the_rest_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LOAD_SECONDS", 0.2)

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            well, silent = await cluster.instance("m-0"), await cluster.instance("m-1")
            loading = asyncio.create_task(cluster.client.load_weights("/new", None))
            obeying = asyncio.create_task(well.obey(*RELOAD, identity=b"new"))
            await silent.obey(*RELOAD[:2])
            await silent.heard(WakeInstance)
            await asyncio.gather(loading, obeying)
            assert [node.hello.name for node in cluster.client.sessions] == ["m-0"]
            assert cluster.client.stats().mode == "serving"

    finish(main())


def test_an_instance_that_has_other_weights_after_its_order_was_given_up_joins_anew():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            await cluster.instance("m-0")
            late = await cluster.instance("m-1")
            late.send(ModelChanged("/new", b"new"))
            while len(cluster.client.sessions) > 1:
                await asyncio.sleep(0.001)
            assert [node.hello.name for node in cluster.client.sessions] == ["m-0"]

    finish(main())


def test_two_orders_about_weights_do_not_run_at_once():
    async def main() -> None:
        orders, gate = AdminOrders(), asyncio.Event()

        async def work() -> None:
            await gate.wait()

        async def fail() -> None:
            raise Unavailable("lost")

        first = await orders.run("sleep", 0.0, work())
        with pytest.raises(ApiError, match=r"order 1 \(sleep\) is under way"):
            await orders.run("wake", 1.0, work())
        with pytest.raises(Unavailable, match="lost"):
            await orders.run("resume", 1.0, fail())
        gate.set()
        await first.task
        assert (await orders.run("wake", 1.0, work())).state == "done"
        assert [order["state"] for order in orders.view()] == ["done", "failed", "done"]

    finish(main())


def test_what_is_remembered_of_orders_is_bounded():
    async def main() -> None:
        orders = AdminOrders()

        async def work() -> None:
            pass

        for _ in range(150):
            await orders.run("resume", 1.0, work())
        assert len(orders.view()) <= 101
        assert orders.view()[0]["order"] == 150

    finish(main())
