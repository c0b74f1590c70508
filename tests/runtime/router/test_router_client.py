"""A cluster seen as one engine: the router's client with the real router machine, and tests in the place of instances."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from client_pair import Asked, request
from cluster_rig import READY, Cluster, FakeInstance
from msgspec.structs import replace
from run_loop import finish

from baton.api.errors import as_api_error
from baton.api.generate.engine_client import EngineRefused
from baton.core.cluster.events import ClusterEffect, ClusterEvent
from baton.core.cluster.router import Router
from baton.errors import CallerError, Unavailable
from baton.protocol.control import (
    AbortRequest,
    ClearCache,
    InstanceStats,
    OrderAnswer,
    PauseInstance,
    RefusedRequest,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
)
from baton.protocol.handoff import Adopted, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import Incarnation, Instant, RequestId, Slot
from baton.protocol.instance import InstanceRefused, PathView
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused
from baton.protocol.step import RowLogprobs, TokenLogprob


def ended(
    name: RequestId, tokens: int = 1, index: int = 0, reason: FinishReason = FinishReason.LENGTH, attempt: int = 1
) -> Ended:
    """After so many tokens: an end that counts others is none."""
    return Ended(name, index, reason, 3, 0, tokens, 0, attempt=attempt)


async def settled(*instances: FakeInstance) -> None:
    """Everything that they sent has been taken in."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_a_request_runs_on_an_instance_under_another_name():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            there = await one.heard(GenerateRequest)
            assert there.id == f"{cluster.client.name}.a"
            assert replace(there, id=RequestId("a"), age_seconds=0.0) == request()
            one.send(Emit([(there.id, 1, 0, 0, [5])], []), Emit([(there.id, 1, 0, 1, [6])], [ended(there.id, 2)]))
            await asked.over
            assert asked.tokens == [5, 6]
            assert asked.deltas[-1].ended == ended(RequestId("a"), 2), "by the name that the API knows"

    finish(main())


def test_two_routers_never_mean_the_same_request():
    async def main() -> None:
        async with Cluster() as one, Cluster() as other:
            assert one.client.name != other.client.name

    finish(main())


async def hand_off(prefill: FakeInstance, decode: FakeInstance, fault: str = "") -> RequestId:
    """The whole trip up to decode going on, with token 5 from prefill."""
    expect = await decode.heard(Reserve)
    name, attempt = expect.request.id, expect.request.attempt
    decode.send(Reserved(name, attempt, 0))
    wanted = await prefill.heard(Prefill)
    assert wanted.request.sampling.max_tokens == len(wanted.request.delivered(0)) + 1
    offer = Offer(name, attempt, 9, 0, (3,), 3, last=True, cached_tokens=2)
    prefill.send(Emit([(name, attempt, 0, 0, [5])], []), offer)
    assert await decode.heard(PeerOffer) == PeerOffer(offer, ("/peer/p-0",), (5,))
    decode.send(Release(name, attempt))
    assert await prefill.heard(Release) == Release(name, attempt)
    prefill.send(Released(name, attempt, True))
    assert (await decode.heard(Released)).kept
    decode.send(Adopted(name, attempt, 0 if fault else 3, fault))
    return name


def test_a_prompt_is_handed_from_one_instance_to_another():
    async def main() -> None:
        seconds: list[float] = []
        async with Cluster() as cluster, asyncio.timeout(8):
            prefill, decode = await cluster.instance("p-0", "prefill"), await cluster.instance("d-0", "decode")
            cluster.client.on_handoff = seconds.append
            asked = Asked(cluster.client, request())
            name = await hand_off(prefill, decode)
            decode.send(Emit([(name, 1, 0, 1, [6])], []), Emit([(name, 1, 0, 2, [7])], [ended(name, 3)]))
            await asked.over
            assert asked.tokens == [5, 6, 7]
            last = asked.deltas[-1].ended
            assert last is not None
            assert (last.cached_tokens, last.output_tokens) == (2, 3), "of prefill, and counted here"
            view = cluster.client.view()
            assert view.counters["handoffs"] == len(seconds) == 1
            assert [(each.name, each.role, each.state) for each in view.instances] == [
                ("p-0", "prefill", "alive"),
                ("d-0", "decode", "alive"),
            ]

    finish(main())


def test_a_pair_between_which_blocks_do_not_arrive_is_shown_with_the_reason():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            prefill, decode = await cluster.instance("p-0", "prefill"), await cluster.instance("d-0", "decode")
            asked = Asked(cluster.client, request())
            name = await hand_off(prefill, decode, fault="tcp://10.0.0.2:8200: no route\nto host")
            decode.send(Emit([(name, 1, 0, 1, [6])], []), Emit([(name, 1, 0, 2, [7])], [ended(name, 3)]))
            await asked.over
            (path,) = cluster.client.view().failed_paths
            assert path == PathView("d-0", "p-0", 1, r"tcp://10.0.0.2:8200: no route\nto host")

    finish(main())


def test_when_an_instance_is_lost_another_goes_on_and_every_token_comes_once():
    """At once: the end of its session says so, and nobody waits until its silence does."""

    async def main() -> None:
        async with Cluster(suspect_seconds=59.0, lapse_seconds=60.0) as cluster, asyncio.timeout(8):
            one, other = await cluster.instance("m-0"), await cluster.instance("m-1")
            asked = Asked(cluster.client, request())
            _, pending = done = await asyncio.wait(
                [asyncio.create_task(each.heard(GenerateRequest), name=each.hello.name) for each in (one, other)],
                return_when=asyncio.FIRST_COMPLETED,
            )
            (first,) = done[0]
            lost, survivor = (one, other) if first.get_name() == "m-0" else (other, one)
            name = first.result().id
            lost.send(Emit([(name, 1, 0, 0, [5]), (name, 1, 0, 1, [6])], []))
            await settled()
            await lost.leave()
            (again,) = pending
            replay = await again
            assert (replay.attempt, replay.outputs) == (2, ((5, 6),))
            survivor.send(Emit([(name, 2, 0, 2, [7])], [ended(name, 3, attempt=2)]))
            await asked.over
            assert asked.tokens == [5, 6, 7]
            assert cluster.client.view().counters["replays"] == 1

    finish(main())


def test_an_instance_that_falls_silent_is_suspect_then_given_up():
    async def main() -> None:
        async with Cluster(beat_seconds=0.05, suspect_seconds=0.3, lapse_seconds=0.6) as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            await cluster.client.ping(1)
            one.fall_silent()
            while cluster.client.sessions:
                await asyncio.sleep(0.02)
            with pytest.raises(Unavailable, match="no instance"):
                await cluster.client.ping(1)

    finish(main())


def test_a_router_that_was_stopped_itself_gives_nobody_up_for_it():
    """On a machine with too few cores all processes stand still together, and the router may be the first to go on."""

    async def main() -> None:
        async with Cluster(beat_seconds=0.05, suspect_seconds=0.3, lapse_seconds=0.6) as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            time.sleep(1.0)  # the loop stands still, and with it the instance
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(cluster.client.sessions) == 1
            one.fall_silent()
            while cluster.client.sessions:
                await asyncio.sleep(0.02)

    finish(main())


def test_health_is_that_of_the_healthiest():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one, _ = await cluster.instance("m-0"), await cluster.instance("m-1")
            one.beat = replace(one.beat, fault="no progress for 3 s")
            one.send(one.beat)
            await settled()
            await cluster.client.ping(1)
            assert [each.state for each in cluster.client.view().instances] == ["suspect", "alive"]
            await cluster._instances[1].leave()
            with pytest.raises(Unavailable, match="m-0: no progress for 3 s"):
                await cluster.client.ping(1)

    finish(main())


def test_a_request_is_turned_away_with_the_time_to_come_back():
    async def main() -> None:
        async with Cluster(no_instance_seconds=0.05) as cluster, asyncio.timeout(8):
            with pytest.raises(EngineRefused) as refused:
                await Asked(cluster.client, request()).over
            answer = as_api_error(refused.value)
            assert answer.http_status == 503
            assert int(answer.headers["retry-after"]) >= 1

    finish(main())


def test_a_request_that_cannot_go_on_breaks_off():
    async def main() -> None:
        async with Cluster(no_instance_seconds=0.05) as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            there = await one.heard(GenerateRequest)
            one.send(Emit([(there.id, 1, 0, 0, [5])], []))
            await settled()
            await one.leave()
            with pytest.raises(Unavailable):
                await asked.over
            assert asked.tokens == [5]

    finish(main())


def test_a_stop_string_seen_in_the_middle_of_a_delivery_ends_that_sequence():
    """The API aborts from within `take`, while the machine's effects are being carried out."""

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request(n=2))
            take = asked.take
            asked.take = take
            there = await one.heard(GenerateRequest)
            cluster.client._streams[there.id]._take = lambda delta: (
                take(delta),
                delta.tokens == [5] and cluster.client.abort(RequestId("a"), 0, FinishReason.STOP),
            )
            one.send(Emit([(there.id, 1, 0, 0, [5]), (there.id, 1, 1, 0, [6])], []))
            assert await one.heard(AbortRequest) == AbortRequest(there.id, 0, FinishReason.STOP)
            one.send(
                Emit([], [ended(there.id, 1, 0, FinishReason.STOP)]), Emit([(there.id, 1, 1, 1, [7])], [ended(there.id, 2, 1)])
            )
            await asked.over
            assert asked.tokens == [5, 6, 7]

    finish(main())


def test_a_client_that_leaves_withdraws_its_request():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            there = await one.heard(GenerateRequest)
            asked.over.cancel()
            assert await one.heard(AbortRequest) == AbortRequest(there.id)
            one.send(Emit([], [ended(there.id, 0, 0, FinishReason.ABORT)]))
            await settled()
            assert cluster.machine.idle

    finish(main())


def test_what_the_model_thought_comes_through():
    def row(sampled: TokenLogprob | None, *prompt: TokenLogprob) -> RowLogprobs:
        return RowLogprobs(Slot(0), Incarnation(1), sampled, 1, prompt)

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request(logprobs=0, prompt_logprobs=0))
            name = (await one.heard(GenerateRequest)).id
            thoughts = [TokenLogprob(token, -float(token), 1) for token in (2, 3, 5, 6)]
            one.send(Emit([(name, 1, 0, 0, [5])], [], [(name, 0, row(thoughts[2], *thoughts[:2]))]))
            one.send(Emit([(name, 1, 0, 1, [6])], [ended(name, 2)], [(name, 0, row(thoughts[3]))]))
            await asked.over
            assert asked.deltas[0].prompt_logprobs == [None, *thoughts[:2]]
            assert [entry for delta in asked.deltas for entry in delta.logprobs] == thoughts[2:]

    finish(main())


def test_refusals_of_instances_are_not_the_clients():
    async def main() -> None:
        async with Cluster(again_seconds=0.05) as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            there = await one.heard(GenerateRequest)
            one.send(RefusedRequest(there.id, Refused("queue_full", 2, 1), there.attempt))
            again = await one.heard(GenerateRequest)
            assert again.attempt > there.attempt
            one.send(Emit([(there.id, again.attempt, 0, 0, [5])], [ended(there.id, attempt=again.attempt)]))
            await asked.over
            assert asked.tokens == [5]

    finish(main())


def test_numbers_are_sums_and_counters_never_fall():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one, other = await cluster.instance("m-0"), await cluster.instance("m-1")
            one.send(InstanceStats(running=1, blocks_total=10, output_tokens=100, ended={"stop": 2}))
            other.send(InstanceStats(running=2, blocks_total=20, output_tokens=50, ended={"stop": 1, "length": 4}))
            await settled()
            stats = cluster.client.stats()
            assert (stats.running, stats.blocks_total, stats.output_tokens) == (3, 30, 150)
            assert stats.ended == {"stop": 3, "length": 4}
            await one.leave()
            stats = cluster.client.stats()
            assert (stats.running, stats.blocks_total, stats.output_tokens) == (2, 20, 150)
            assert stats.ended == {"stop": 3, "length": 4}

    finish(main())


def test_an_instance_that_does_not_fit_is_told_why():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            await cluster.instance("m-0")
            odd = await cluster.connect("m-1", ready=replace(READY, identity=b"others"))
            refused = await cluster.refused(odd)
            assert "identity" in refused.reason
            assert len(cluster.client.sessions) == 1

    finish(main())


def test_the_view_names_refused_instances_and_why_until_they_join(caplog: pytest.LogCaptureFixture):
    parts = {"weights": "12ab", "kernels": "avx2 1"}

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            await cluster.instance("m-0", ready=replace(READY, identity_parts=parts))
            for _ in range(2):
                other = replace(READY, identity=b"others", identity_parts={**parts, "weights": "34cd"})
                reason = (await cluster.refused(await cluster.connect("m-1", ready=other))).reason
            assert "weights 34cd instead of 12ab" in reason
            assert "kernels" not in reason
            (shown,) = cluster.client.view().refused
            assert (shown.name, shown.reason, shown.times) == ("m-1", reason, 2)
            assert any(reason in record.getMessage() for record in caplog.records)
            await cluster.instance("m-1", ready=replace(READY, identity_parts=parts))
            assert cluster.client.view().refused == ()

    finish(main())


# Orders


def test_a_pause_waits_for_what_is_open_then_all_instances_pause():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            name = (await one.heard(GenerateRequest)).id
            pausing = asyncio.create_task(cluster.client.pause(None))
            await settled()
            assert cluster.client.stats().mode == "draining"
            with pytest.raises(EngineRefused, match="draining"):
                await Asked(cluster.client, request(RequestId("b"))).over
            one.send(Emit([(name, 1, 0, 0, [5])], [ended(name)]))
            await asked.over
            await one.obey(PauseInstance)
            await pausing
            assert cluster.client.stats().mode == "paused"
            late = await cluster.instance("m-1")
            await late.heard(PauseInstance)
            resuming = asyncio.create_task(cluster.client.resume())
            await one.obey(ResumeInstance)
            await late.obey(ResumeInstance)
            await resuming
            assert cluster.client.stats().mode == "serving"

    finish(main())


def test_a_pause_with_a_limit_ends_what_is_still_open():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            name = (await one.heard(GenerateRequest)).id
            pausing = asyncio.create_task(cluster.client.pause(0.05))
            assert await one.heard(AbortRequest) == AbortRequest(name)
            one.send(Emit([], [ended(name, 0, 0, FinishReason.ABORT)]))
            await asked.over
            (order,) = await one.obey(PauseInstance)
            assert order.drain_seconds_max == 0.0
            await pausing

    finish(main())


def test_a_cluster_that_is_resumed_was_not_paused():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            asked = Asked(cluster.client, request())
            name = (await one.heard(GenerateRequest)).id
            pausing = asyncio.create_task(cluster.client.pause(None))
            await settled()
            resuming = asyncio.create_task(cluster.client.resume())
            await one.obey(ResumeInstance)
            await resuming
            with pytest.raises(Unavailable, match="resumed before"):
                await pausing
            one.send(Emit([(name, 1, 0, 0, [5])], [ended(name)]))
            await asked.over

    finish(main())


def test_a_cluster_without_instances_can_be_paused_and_whoever_joins_is():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            await cluster.client.pause(1.0)
            assert cluster.client.stats().mode == "paused"
            late = await cluster.instance("m-0")
            await late.heard(PauseInstance)
            resuming = asyncio.create_task(cluster.client.resume())
            await late.obey(ResumeInstance)
            await resuming

    finish(main())


@pytest.mark.parametrize("asleep", [False, True])
def test_an_instance_whose_session_was_lost_when_all_were_resumed_is_resumed_when_it_is_back(asleep: bool):
    """It stayed paused, or asleep, until somebody looked."""

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            there, away = await cluster.instance("m-0"), await cluster.instance("m-1")
            orders = (PauseInstance, SleepInstance) if asleep else (PauseInstance,)
            pausing = asyncio.create_task(cluster.client.sleep(None) if asleep else cluster.client.pause(None))
            await asyncio.gather(*(each.obey(*orders) for each in (there, away)))
            await pausing
            await away.leave()
            resuming = asyncio.create_task(cluster.client.wake() if asleep else cluster.client.resume())
            await there.obey(*((WakeInstance, ResumeInstance) if asleep else (ResumeInstance,)))
            await resuming
            back = await cluster.instance("m-1")
            await back.obey(WakeInstance, ResumeInstance)
            await back.leave()
            again, stranger = await cluster.instance("m-1"), await cluster.instance("m-2")
            clearing = asyncio.create_task(cluster.client.clear_cache(device=True, host=True))
            await asyncio.gather(*(each.obey(ClearCache) for each in (there, again, stranger)))  # the first order that they get
            await clearing

    finish(main())


def test_an_instance_that_joins_while_others_pause_is_paused_too():
    """It served on, and refused to sleep: orders to sleep and to load weights failed."""

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            sleeping = asyncio.create_task(cluster.client.sleep(None))
            order = await one.heard(PauseInstance)
            late = await cluster.instance("m-1")
            one.send(OrderAnswer(order.number, "done"))
            await late.obey(PauseInstance, SleepInstance)
            await one.obey(SleepInstance)
            await sleeping
            assert cluster.client.stats().mode == "asleep"

    finish(main())


def test_a_pause_for_other_weights_is_held_by_the_session_and_no_other_is():
    """A router that was killed in the middle left the whole cluster paused."""

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            loading = asyncio.create_task(cluster.client.load_weights("/new", None))
            (taken, _) = await one.obey(PauseInstance, SleepInstance)
            late = await cluster.instance("m-1")
            assert (await late.heard(PauseInstance)).held
            await one.obey(WakeInstance, ResumeInstance, identity=b"new")
            await loading
            assert taken.held
            pausing = asyncio.create_task(cluster.client.pause(None))
            (order,) = await one.obey(PauseInstance)
            await pausing
            assert not order.held

    finish(main())


def test_one_that_joins_with_old_weights_while_others_reload_is_the_one_that_does_not_fit():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            loading = asyncio.create_task(cluster.client.load_weights("/new", None))
            await one.obey(PauseInstance, SleepInstance)
            late = await cluster.instance("m-1")
            await late.heard(PauseInstance)
            await one.obey(WakeInstance, identity=b"new")
            assert "identity" in (await late.heard(InstanceRefused)).reason
            await one.obey(ResumeInstance)
            await loading
            assert [node.hello.name for node in cluster.client.sessions] == ["m-0"]

    finish(main())


def test_an_order_without_an_instance_is_refused():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            with pytest.raises(Unavailable, match="no instance"):
                await cluster.client.clear_cache(device=True, host=True)

    finish(main())


def test_an_instance_that_is_lost_on_the_way_does_not_hold_up_an_order():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one, other = await cluster.instance("m-0"), await cluster.instance("m-1")
            clearing = asyncio.create_task(cluster.client.clear_cache(device=True, host=False))
            (order,) = await one.obey(ClearCache)
            assert (order.device, order.host) == (True, False)
            await other.leave()
            await clearing

    finish(main())


RELOAD = (PauseInstance, SleepInstance, WakeInstance)


def test_other_weights_are_served_when_all_have_them():
    async def main() -> None:
        identities: list[bytes] = []
        async with Cluster() as cluster, asyncio.timeout(8):
            instances = [await cluster.instance("m-0"), await cluster.instance("m-1")]
            cluster.client.orders.on_identity = identities.append
            loading = asyncio.create_task(cluster.client.load_weights("/new", None))
            done = await asyncio.gather(*(each.obey(*RELOAD, ResumeInstance, identity=b"new") for each in instances))
            assert [orders[2].model for orders in done] == ["/new", "/new"]
            await loading
            assert identities == [b"new"]
            assert len(cluster.client.sessions) == 2, "they fit each other again"
            late = await cluster.connect("m-2")
            assert "identity" in (await cluster.refused(late)).reason
            assert cluster.client.stats().mode == "serving"

    finish(main())


def test_where_one_cannot_load_them_all_have_the_old_ones_again():
    async def main() -> None:
        identities: list[bytes] = []
        async with Cluster() as cluster, asyncio.timeout(8):
            can, cannot = await cluster.instance("m-0"), await cluster.instance("m-1")
            cluster.client.orders.on_identity = identities.append
            loading = asyncio.create_task(cluster.client.load_weights("/new", None))

            async def obey_and_go_back() -> None:
                await can.obey(*RELOAD, identity=b"new")
                _, back = await can.obey(SleepInstance, WakeInstance, identity=b"weights")
                assert back.model == "/old/m-0", "what it had itself"
                await can.obey(ResumeInstance)

            async def refuse() -> None:
                await cannot.obey(*RELOAD, refuse="another vocabulary")
                await cannot.obey(ResumeInstance)

            await asyncio.gather(obey_and_go_back(), refuse())
            with pytest.raises(CallerError, match="m-1: another vocabulary"):
                await loading
            assert identities == [b"weights"]
            assert len(cluster.client.sessions) == 2

    finish(main())


def test_weights_that_nobody_has_loaded_are_not_reported_as_served():
    """Found by an audit: where every instance was lost on the way, the answer was that all was done."""

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            one = await cluster.instance("m-0")
            loading = asyncio.create_task(cluster.client.load_weights("/new", None))
            await one.obey(PauseInstance, SleepInstance)
            await one.heard(WakeInstance)
            await one.leave()
            with pytest.raises(Unavailable, match="every instance was lost"):
                await loading
            assert cluster.client.stats().mode == "serving"

    finish(main())


def test_where_one_cannot_be_put_to_sleep_the_cluster_serves_on():
    """Found by an audit: it stayed paused."""

    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(8):
            sleeps, does_not = await cluster.instance("m-0"), await cluster.instance("m-1")
            loading = asyncio.create_task(cluster.client.load_weights("/new", None))
            await asyncio.gather(sleeps.obey(PauseInstance, SleepInstance), does_not.obey(PauseInstance))
            order = await does_not.heard(SleepInstance)
            does_not.send(OrderAnswer(order.number, "refused", "wait for a worker that is being started"))
            back = await asyncio.gather(*(each.obey(WakeInstance, ResumeInstance) for each in (sleeps, does_not)))
            assert [orders[0].model for orders in back] == ["", ""], "with what they have"
            with pytest.raises(Unavailable, match="that is being started"):
                await loading
            assert cluster.client.stats().mode == "serving"

    finish(main())


def test_the_context_is_what_every_instance_holds():
    """So that each of them can go on with what another has begun."""

    async def main() -> None:
        async with Cluster() as cluster:
            seen: list[int | None] = []
            cluster.client.instances.on_changed = lambda: seen.append(cluster.client.instances.context_tokens)
            await cluster.instance("large")
            small = await cluster.instance("small", ready=replace(READY, blocks=16, context_tokens=256))
            await cluster.instance("middle", ready=replace(READY, context_tokens=300))
            assert seen == [512, 256, 256]
            await small.leave()
            assert cluster.client.instances.context_tokens == 300
            assert seen[-1] == 300

    finish(main())


# Two instances with one name, and a router that was stalled


def test_two_instances_with_one_name_the_live_one_stays():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            first = await cluster.instance("m-0")
            for life in range(2, 6):
                rival = await cluster.connect("m-0")
                rival.hello = replace(rival.hello, incarnation=life)
                refused = await cluster.refused(rival)
                assert "a name of its own (--name)" in refused.reason
                assert 0.0 < refused.retry_seconds <= 1.0
            asked = Asked(cluster.client, request())
            there = await first.heard(GenerateRequest)
            first.send(Emit([(there.id, 1, 0, 0, [5])], [ended(there.id, 1)]))
            await asked.over
            assert cluster.client.view().counters["lost_joined_again"] == 0

    finish(main())


def test_an_instance_that_dials_again_replaces_its_earlier_session():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            await cluster.instance("m-0")
            await cluster.instance("m-0")
            assert len(cluster.client.sessions) == 1
            assert cluster.client.view().counters["lost_joined_again"] == 1

    finish(main())


class Counting:
    """A machine whose events are counted."""

    def __init__(self, machine: Router) -> None:
        self._machine, self.events = machine, Counter[str]()

    def handle(self, event: ClusterEvent, now: Instant) -> list[ClusterEffect]:
        self.events[type(event).__name__] += 1
        return self._machine.handle(event, now)

    def __getattr__(self, name: str) -> object:
        return getattr(self._machine, name)


def test_many_events_in_one_turn_of_the_loop_make_one_placement_pass():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            await cluster.instance("m-0")
            counting = cluster.client._driver.machine = Counting(cluster.machine)
            asked = [Asked(cluster.client, request(f"r{number}")) for number in range(20)]
            while counting.events["SubmitRequest"] < 20:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert counting.events["RunPass"] <= 2
            cluster.client.withdraw_all()
            for one in asked:
                await one.over

    finish(main())


def test_a_router_that_was_stalled_renews_all_instances_at_once():
    async def main() -> None:
        async with Cluster() as cluster, asyncio.timeout(20):
            for number in range(8):
                await cluster.instance(f"m-{number}")
            counting = cluster.client._driver.machine = Counting(cluster.machine)
            time.sleep(cluster.config.lapse_seconds + 0.5)  # the whole process
            while not counting.events["Resumed"]:
                await asyncio.sleep(0)
            assert (counting.events["Resumed"], counting.events["RunPass"]) == (1, 0)
            await settled()
            assert len(cluster.client.sessions) == 8

    finish(main())
