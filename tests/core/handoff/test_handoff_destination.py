"""The decode end of a hand-off: room is kept, blocks are pulled, and only what was released is believed."""

from typing import Any

import pytest

from baton.core.effects import Mode, Refuse
from baton.core.engine.phase import Phase
from baton.core.events import Abort, CacheReady, Pause, Submit
from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import BlockId, PoolIncarnation, RequestId
from baton.protocol.moves import BlockMove
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import GenerateRequest

from ..engine.harness import FakeWorker, fold, freeze, make_request, mark, undisturbed
from ..engine.pair import Node, Pair

LEASE = 10.0
PROMPT = tuple(range(3, 17))  # 14 tokens: three full blocks of four, and half of one
A = RequestId("a")
POOL = PoolIncarnation(77)
SIZE = 4


class Peer:
    """Stands for the prefill instance: memory with the prompt in blocks 100, 101, ..."""

    name = "peer"
    pool_incarnation = POOL

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.worker = FakeWorker(SIZE)
        marks: list[int] = []
        for place, token in enumerate(tokens):
            marks.append(mark(fold(marks), token))
            self.worker.memory[100 + place // SIZE, place % SIZE] = marks[-1]


class Decoder(Node):
    """An instance that goes on with prompts of others; the test is the router and the other instance."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("decode", **settings)
        self.request: GenerateRequest = make_request("a", PROMPT, max_tokens=6)

    def expect(self, name: str = "a", prompt: tuple[int, ...] = PROMPT, lease: float = LEASE, **given: Any) -> list[Any]:
        self.request = make_request(name, prompt, **({"max_tokens": 6} | given))
        self.other = Peer((*self.request.prompt, *self.request.delivered(self.request.wanted[0])))  # type: ignore[assignment]
        return self.dispatch(Reserve(self.request, lease))

    def offer(self, first: int, end: int, *, last: bool = False, attempt: int = 1, **given: Any) -> list[Any]:
        """Blocks first..end of the peer's table. With the last the tokens that the client has by now."""
        request = self.request
        known = len(request.prompt) + len(request.delivered(request.wanted[0]))
        blocks = tuple(BlockId(100 + place) for place in range(first, end))
        fields = {"tokens": min(known, end * SIZE), "last": last, "pool": POOL} | given
        outputs = fields.pop("outputs", None)
        if outputs is None:
            index = request.wanted[0]
            outputs = tuple(undisturbed(request, index)[: len(request.delivered(index)) + 1]) if last else ()
        offer = Offer(request.id, attempt, place=first, blocks=blocks, **fields)
        return self.dispatch(PeerOffer(offer, given.get("peers", ("peer",)), outputs))

    def all_pulled(self) -> None:
        while "pull" in self.kinds:
            self.carry_out("pull")

    def release(self, kept: bool = True, attempt: int = 1) -> list[Any]:
        return self.dispatch(Released(self.request.id, attempt, kept))

    def take(self, kind: type) -> list[Any]:
        found = [message for message in self.said if isinstance(message, kind)]
        for message in found:
            self.said.remove(message)
        return found

    def refusals(self) -> list[str]:
        return [refuse.refused.reason for refuse in self.take(Refuse)]

    def outputs(self, name: str = "a", index: int = 0) -> list[int]:
        """As its client has them: those of this instance come after what was delivered elsewhere."""
        rows = [row for message in self.said if isinstance(message, Emit) for row in each_token(message.tokens)]
        mine = [(row[3], row[4]) for row in rows if row[0] == name and row[2] == index]
        assert [position for position, _ in mine] == list(range(mine[0][0], mine[0][0] + len(mine))) if mine else True
        return [token for _, token in mine]

    def ends(self) -> list[Ended]:
        return [end for message in self.said if isinstance(message, Emit) for end in message.ended]

    def goes_on(self) -> None:
        """It finishes by itself, with the right tokens."""
        self.settle()
        for index in self.request.wanted:
            owed = undisturbed(self.request, index)
            told = self.outputs(self.request.id, index)
            assert told == owed[len(owed) - len(told) :]
        assert [end.reason.value for end in self.ends()] == ["length"] * len(self.request.wanted)
        self.said.clear()
        self.assert_at_rest()

    @property
    def leader(self) -> Any:
        return self.instance.board.groups[self.request.id].leader

    @property
    def held(self) -> int:
        return int(self.pool.total - self.pool.free - self.pool.idle)


def handed(**settings: Any) -> Decoder:
    """All is pulled, and its release is asked for."""
    node = Decoder(**settings)
    node.expect()
    node.offer(0, 4, last=True)
    node.all_pulled()
    return node


# Reserving


def test_room_is_kept_for_the_prompt_and_the_token_to_come():
    node = Decoder()
    node.expect(prompt=PROMPT[:12])
    assert node.held == 4
    assert [(m.request, m.attempt, m.cached_tokens) for m in node.take(Reserved)] == [("a", 1, 0)]
    assert node.leader.phase is Phase.LOADING
    assert node.instance.board.queued == 0
    assert not node.plans


def test_without_room_it_is_refused_with_the_numbers_and_leaves_nothing():
    node = Decoder(blocks=5)
    node.dispatch(Submit(make_request("b", (1, 2, 3, 4, 5), max_tokens=3)))
    node.expect()
    (refuse,) = node.take(Refuse)
    assert (refuse.refused.reason, refuse.refused.needed, refuse.refused.limit) == ("no_room", 4, 3)
    node.run()
    node.said.clear()
    node.assert_at_rest()
    node.expect()
    assert node.take(Reserved), "a refusal does not close the attempt"


def test_growth_of_what_runs_keeps_its_room():
    node = Decoder(blocks=8, reserve_start=1.0)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=18)))
    node.expect()
    assert node.refusals() == ["no_room"]


def test_growth_of_other_reservations_keeps_its_room():
    """Each needs 4 blocks now and 18 in the end, of 24. A third one would leave the two that came before no room to grow."""
    node = Decoder(blocks=24, reserve_start=1.0)
    for number in range(7):
        node.expect(f"r{number}", prompt=tuple(range(20 * number, 20 * number + 12)), max_tokens=60)
    assert len(node.take(Reserved)) == 2
    assert node.refusals() == ["no_room"] * 5
    assert node.held == 8


def test_admission_leaves_room_for_the_growth_of_a_reservation():
    node = Decoder(blocks=24, reserve_start=1.0)
    node.expect(prompt=PROMPT[:12], max_tokens=60)
    node.dispatch(Submit(make_request("b", range(50, 62), max_tokens=2)))
    assert node.instance.view.running(), "4 + 14 blocks for the reservation, 3 for this one"
    node.dispatch(Submit(make_request("c", range(70, 86), max_tokens=2)))
    node.step()
    assert node.instance.stats.held_back["blocks"] > 0
    assert "c" not in [s.request.id for s in node.instance.view.running()]


def test_a_burst_of_reservations_is_not_preempted_where_all_is_declared_and_reserved():
    """24 requests at once, the whole growth reserved: as in one instance that does it all, they wait instead."""
    pair = Pair(blocks=24, decode={"reserve_start": 1.0, "reserve_learning": 0.0}, prefill={"blocks": 200})
    for number in range(24):
        pair.start(f"r{number}", range(20 * number, 20 * number + 12), max_tokens=20)
    for _ in range(60):
        pair.run()
        for name, routed in pair.routed_requests.items():
            if routed.refused:
                routed.refused.clear()
                pair.expect(name)
    pair.assert_answered()
    assert pair.decode.instance.stats.preemptions == 0


def test_who_is_in_line_before_it_comes_first():
    node = Decoder(blocks=8)
    node.dispatch(Submit(make_request("b", tuple(range(20)), max_tokens=2)))
    node.dispatch(Submit(make_request("c", tuple(range(30, 44)), max_tokens=2)))
    assert len(node.instance.board.waiting) == 1
    node.expect(prompt=PROMPT[:3])
    assert node.refusals() == ["no_room"]
    node.expect(prompt=PROMPT[:3], age_seconds=100.0, attempt=2)
    assert node.take(Reserved), "it is older"


def test_the_line_is_not_asked_what_it_holds():
    node = Decoder(requests_max=1, blocks=64, slots=1)
    node.dispatch(Submit(make_request("b", (1, 2), max_tokens=30)))
    node.dispatch(Submit(make_request("c", (5, 6), max_tokens=3)))
    node.expect(n=2)
    assert node.take(Reserved)
    assert node.instance.board.queued == 1


def test_their_number_has_a_bound():
    node = Decoder(reservations_max=2)
    for name in "abc":
        node.expect(name)
    assert len(node.take(Reserved)) == 2
    assert node.refusals() == ["queue_full"]


def test_a_draining_instance_reserves_nothing_and_finishes_what_it_has():
    node = handed()
    node.dispatch(Pause())
    node.expect("b")
    assert node.refusals() == ["draining"]
    node.request = make_request("a", PROMPT, max_tokens=6)
    node.release()
    node.goes_on()
    assert node.modes == [Mode.DRAINING, Mode.PAUSED]


def test_asked_again_it_lasts_longer():
    node = Decoder()
    node.expect()
    node.advance(9.0)
    node.expect(lease=20.0)
    assert len(node.take(Reserved)) == 2
    node.advance(19.0)
    assert node.held == 4
    node.offer(0, 1)
    node.advance(19.0)
    assert node.leader.phase is Phase.LOADING
    node.all_pulled()
    node.advance(1.0)
    assert not node.instance.board.groups
    assert not node.said
    node.assert_at_rest()


def test_asked_again_after_the_last_offer_it_lasts_no_longer():
    """From then on the time is that of the copy."""
    node = Decoder(pull_seconds_max=5.0)
    node.expect(lease=100.0)
    node.offer(0, 4, last=True)
    node.dispatch(Reserve(node.request, 100.0))
    node.advance(5.1)
    assert [message.tokens for message in node.take(Adopted)] == [0], "what did not come is computed"
    node.told.clear()
    node.lose_cache()
    node.said.clear()
    node.settle()
    assert [end.reason.value for end in node.ends()] == ["length"]


def test_a_lapsed_one_is_closed():
    node = Decoder()
    node.expect()
    node.said.clear()
    node.advance(LEASE)
    node.offer(0, 4, last=True)
    node.release()
    assert not node.said
    node.expect()
    assert node.refusals() == ["duplicate_id"]
    node.assert_at_rest()


def test_a_lapse_while_a_pull_writes_frees_its_blocks_when_that_is_over():
    node = Decoder()
    node.expect()
    node.offer(0, 2)
    node.advance(LEASE)
    assert not node.instance.board.groups
    assert node.held == 2
    node.carry_out("pull")
    node.said.clear()
    node.assert_at_rest()


# Pulling


def test_a_pull_names_both_ends():
    node = Decoder()
    node.expect()
    node.offer(0, 3)
    (move,) = node.told
    assert isinstance(move, BlockMove)
    assert (move.kind, move.peer, move.peer_pool, move.peer_blocks) == ("pull", "peer", POOL, (100, 101, 102))
    assert move.device == tuple(node.leader.blocks[:3])
    assert (move.pool, move.seconds_max) == (node.pool_incarnation, node.config.tiers.pull_seconds_max)


def test_a_pull_waits_for_plans_that_may_still_write_to_its_blocks():
    node = Decoder(blocks=6, steps_in_flight=2)
    node.dispatch(Submit(make_request("b", tuple(range(40, 60)), max_tokens=2)))
    assert len(node.plans) == 2
    node.dispatch(Abort(RequestId("b")))
    node.expect()
    node.offer(0, 4, last=True)
    node.step()
    assert not node.told, "a plan is out that writes to these blocks"
    node.step()
    assert node.kinds == ["pull"]
    node.all_pulled()
    node.release()
    node.said = type(node.said)(m for m in node.said if not (isinstance(m, Emit) and m.ended))
    node.goes_on()


def test_the_copy_is_believed_only_when_it_is_released():
    node = handed()
    assert [(m.request, m.attempt) for m in node.take(Release)] == [("a", 1)]
    assert not node.plans
    assert not len(node.instance.board.cache), "nothing is published before"
    node.release()
    assert [m.tokens for m in node.take(Adopted)] == [14]
    assert node.instance.stats.adopted == 1
    plan = node.plans[0]
    assert (plan.new[0].computed_tokens, plan.run.counts) == (14, (1,))
    node.goes_on()


@pytest.mark.parametrize("pulled", [False, True])
def test_what_is_not_released_is_computed(pulled):
    node = Decoder()
    node.expect()
    node.offer(0, 4, last=True)
    if pulled:
        node.all_pulled()
    else:
        assert node.take(Release) == []
    node.release(kept=False)
    assert [m.tokens for m in node.take(Adopted)] == [0]
    assert node.instance.stats.not_adopted == 1
    assert node.plans[0].new[0].computed_tokens == 0
    node.goes_on()


def test_released_before_it_is_asked_for_means_nothing():
    node = Decoder()
    node.expect()
    node.offer(0, 4, last=True)
    before = freeze(node.instance)
    node.release()
    assert freeze(node.instance) == before
    node.all_pulled()
    node.release()
    node.goes_on()


def test_not_kept_before_the_last_offer_it_waits_for_its_clients_tokens():
    node = Decoder()
    node.expect()
    node.offer(0, 2)
    node.release(kept=False)
    assert node.leader.phase is Phase.LOADING
    assert node.held == 2, "those that are being written"
    node.all_pulled()
    assert node.held == 0
    node.offer(2, 4, last=True)
    assert not node.take(Release)
    assert [m.tokens for m in node.take(Adopted)] == [0]
    node.goes_on()


def test_nothing_is_kept_there_says_the_last_offer():
    node = Decoder()
    node.expect()
    node.offer(0, 2)
    node.all_pulled()
    node.offer(0, 0, last=True)
    assert not node.take(Release)
    assert node.take(Adopted)
    node.goes_on()


def test_a_pull_that_came_short():
    node = Decoder()
    node.expect()
    node.offer(0, 4, last=True)
    node.carry_out("pull", moved=2, error="peer is gone")
    assert node.take(Release)
    node.release()
    assert [(m.tokens, m.fault) for m in node.take(Adopted)] == [(8, "peer is gone")], "and its router learns why"
    node.goes_on()


def test_pulls_may_end_in_any_order():
    node = Decoder()
    node.expect()
    node.offer(0, 1)
    node.offer(1, 3)
    node.offer(3, 4, last=True)
    node.told.reverse()
    node.all_pulled()
    node.release()
    assert [m.tokens for m in node.take(Adopted)] == [14]
    node.goes_on()


def test_offers_that_are_repeated_or_late_or_of_others_change_nothing():
    node = Decoder()
    node.expect(attempt=2)
    node.offer(0, 2, attempt=2)
    before = freeze(node.instance)
    node.offer(0, 2, attempt=2)
    node.offer(0, 1, attempt=2)
    node.offer(0, 4, last=True, attempt=1)
    node.offer(0, 4, last=True, attempt=3)
    node.offer(3, 4, attempt=2)  # a hole
    node.release(attempt=1)
    node.release(attempt=3, kept=False)
    node.dispatch(PeerOffer(Offer(RequestId("b"), 1, POOL, 0, (), 0, True), ("peer",), ()))
    assert freeze(node.instance) == before
    node.offer(1, 4, last=True, attempt=2)
    moves = [move for move in node.told if isinstance(move, BlockMove)]
    assert [move.peer_blocks for move in moves] == [(100, 101), (102, 103)]
    node.offer(0, 4, last=True, attempt=2)
    node.all_pulled()
    node.release(attempt=2)
    before = freeze(node.instance)
    node.release(attempt=2)
    node.release(attempt=2, kept=False)
    node.offer(0, 4, last=True, attempt=2)
    node.expect(attempt=2)
    assert freeze(node.instance) == before
    assert [type(m) for m in node.said] == [Reserved, Release, Adopted]
    node.goes_on()


def test_more_blocks_than_there_is_room_for():
    node = Decoder()
    node.expect()
    node.offer(0, 9, last=True, tokens=14)
    node.all_pulled()
    node.release()
    node.goes_on()


@pytest.mark.parametrize("outputs", [(), (1, 2, 3)])
def test_other_tokens_than_there_is_room_for(outputs):
    """A router that says something else than it should: the request is a replay with what it says."""
    node = Decoder()
    node.expect()
    owed = tuple(undisturbed(node.request))[: len(outputs)]
    node.offer(0, 4, last=True, outputs=owed)
    assert not node.take(Release)
    assert node.take(Adopted)
    node.goes_on()


def test_without_a_cache_service_it_is_computed():
    node = Decoder()
    node.lose_cache()
    node.expect()
    node.offer(0, 4, last=True)
    assert not node.told
    node.release()
    node.goes_on()


def test_without_an_address_it_is_computed():
    node = Decoder()
    node.expect()
    offer = Offer(A, 1, POOL, 0, (BlockId(100),), 14, True)
    node.dispatch(PeerOffer(offer, (), tuple(undisturbed(node.request)[:1])))
    assert not node.told
    node.release()
    node.goes_on()


def test_the_service_hangs_in_a_pull():
    """What it may write to is nobody's until it is dead. The request does not wait for that."""
    node = Decoder(blocks=8)
    node.expect()
    node.offer(0, 4, last=True)
    tiers = node.config.tiers
    node.advance(tiers.pull_seconds_max)
    assert node.take(Adopted)
    node.run()
    assert node.held == 4
    node.advance(tiers.memory_seconds_max)
    assert node.cache_restarts == 1
    node.lose_cache()
    node.said = type(node.said)(m for m in node.said if isinstance(m, Emit))
    node.goes_on()


def test_the_service_dies_after_all_was_pulled():
    node = handed()
    node.lose_cache()
    node.dispatch(CacheReady())
    node.release()
    assert [m.tokens for m in node.take(Adopted)] == [14]
    node.goes_on()


def test_release_is_not_waited_for_for_ever():
    node = handed()
    node.advance(node.config.tiers.release_seconds_max)
    assert [m.tokens for m in node.take(Adopted)] == [0]
    node.release()
    node.goes_on()


def test_lower_tiers_are_asked_when_nothing_is_handed_over():
    node = Decoder(host_blocks=16, storage=True)
    node.dispatch(Submit(make_request("b", PROMPT, max_tokens=1)))
    node.settle()
    node.forget_device()
    node.said.clear()
    node.expect()
    node.offer(0, 4, last=True)
    node.release(kept=False)
    node.said.clear()
    assert node.kinds == ["pull", "load"]
    node.settle()
    assert [end.cached_tokens for end in node.ends()] == [12]
    node.said = type(node.said)(m for m in node.said if isinstance(m, Emit))
    node.goes_on()


def test_what_is_adopted_is_copied_to_the_host_and_not_to_storage():
    node = handed(host_blocks=16, storage=True)
    node.release()
    assert node.kinds == ["store"]
    node.carry_out("store")
    assert "put" not in node.kinds
    assert len(node.tiers.host) == 3
    node.goes_on()


# Pressure


def test_a_reservation_gives_way_to_growth_and_is_computed_later():
    node = Decoder(blocks=8, steps_in_flight=1)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=25)))
    node.expect()
    node.take(Reserved)
    while node.held < 8 and node.leader.blocks:
        node.step()
    while node.leader.blocks:
        node.step()
    assert node.leader.phase is Phase.LOADING
    assert node.instance.stats.preemptions == 0
    node.offer(0, 4, last=True)
    assert not node.told
    assert not node.take(Release)
    assert node.take(Adopted)
    node.settle()
    assert {end.request: end.output_tokens for end in node.ends()} == {"a": 6, "b": 25}
    assert node.outputs() == undisturbed(node.request)[1:]
    node.said.clear()
    node.assert_at_rest()


def test_one_that_a_pull_writes_to_does_not_give_way():
    node = Decoder(blocks=8, steps_in_flight=1)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=25)))
    node.expect()
    node.offer(0, 2)
    while not node.instance.stats.preemptions:
        node.step()
    assert len(node.leader.blocks) == 4
    node.all_pulled()
    node.offer(2, 4, last=True)
    node.all_pulled()
    node.release()
    node.settle()
    assert {end.request: end.output_tokens for end in node.ends()} == {"a": 6, "b": 25}
    assert node.outputs() == undisturbed(node.request)[1:]
    node.said.clear()
    node.assert_at_rest()


def test_one_that_waits_for_its_release_gives_way_too():
    node = Decoder(blocks=8, steps_in_flight=1)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=25)))
    node.expect()
    node.offer(0, 4, last=True)
    node.step()
    node.all_pulled()
    while node.leader.blocks:
        node.step()
    node.release()
    assert [m.tokens for m in node.take(Adopted)] == [0]
    node.settle()
    assert {end.request: end.output_tokens for end in node.ends()} == {"a": 6, "b": 25}
    assert node.outputs() == undisturbed(node.request)[1:]


def test_an_urgent_head_takes_a_lease_behind_it_before_running_work():
    """The lease alone would do: nothing that runs is preempted."""
    node = Decoder(blocks=25, steps_in_flight=1)
    node.dispatch(Submit(make_request("runs", range(30), max_tokens=3, priority=5)))
    node.expect(prompt=tuple(range(100, 150)), priority=5)
    assert node.held == 8 + 13
    node.dispatch(Submit(make_request("urgent", range(200, 230), max_tokens=2, priority=-5)))
    node.step()
    assert node.instance.stats.preemptions == 0
    assert not node.leader.blocks
    assert [s.request.id for s in node.instance.view.running()] == ["urgent", "runs"]


def test_an_urgent_head_preempts_where_the_leases_behind_it_are_not_enough():
    node = Decoder(blocks=25, steps_in_flight=1)
    node.dispatch(Submit(make_request("runs", range(30), max_tokens=3, priority=5)))
    node.expect(prompt=tuple(range(100, 120)), priority=5)
    node.dispatch(Submit(make_request("urgent", range(200, 284), max_tokens=2, priority=-5)))
    node.step()
    assert node.instance.stats.preemptions == 1


def test_growth_of_a_less_urgent_sequence_leaves_a_more_urgent_lease_alone():
    node = Decoder(blocks=8, steps_in_flight=1)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=12, priority=9)))
    node.dispatch(Submit(make_request("c", (4, 5, 6), max_tokens=12, priority=9)))
    node.expect(priority=-9)
    while not node.instance.stats.preemptions:
        node.step()
        assert len(node.leader.blocks) == 4, "the room of the more urgent reservation is kept"
    assert [s.request.id for s in node.instance.view.running()] == ["b"]


# Ends and attempts


@pytest.mark.parametrize("point", range(5))
@pytest.mark.parametrize("way", ["abort", "forget", "timeout"])
def test_ended_from_outside(way, point):
    node = Decoder()
    node.expect(n=2, timeout_seconds=2.0)
    for act in (lambda: node.offer(0, 2), node.all_pulled, lambda: node.offer(2, 4, last=True), node.all_pulled)[:point]:
        act()
    node.said.clear()
    if way == "abort":
        node.dispatch(Abort(A))
    elif way == "forget":
        node.dispatch(Forget(A, 1))
    else:
        node.advance(2.0)
    node.all_pulled()
    ends = [(end.index, end.reason.value) for end in node.ends()]
    assert ends == ([] if way == "forget" else [(1, way), (0, way)])
    assert not node.take(Adopted)
    node.release()
    node.run()
    node.said.clear()
    node.assert_at_rest()


def test_the_leader_is_withdrawn_and_the_others_go_on_by_themselves():
    node = Decoder()
    node.expect(n=3)
    node.offer(0, 2)
    node.dispatch(Abort(A, 0))
    assert [m.tokens for m in node.take(Adopted)] == [0]
    node.settle()
    assert [(end.index, end.reason.value) for end in node.ends()] == [(0, "abort"), (1, "length"), (2, "length")]
    assert node.outputs(index=2) == undisturbed(node.request, 2)
    node.said.clear()
    node.assert_at_rest()


def test_its_client_has_all_tokens_with_the_last_offer():
    node = Decoder()
    node.expect(max_tokens=1)
    node.offer(0, 4, last=True)
    assert [(end.reason.value, end.output_tokens) for end in node.ends()] == [("length", 1)]
    node.all_pulled()
    node.said.clear()
    node.assert_at_rest()


def test_an_answer_that_was_complete_is_not_expected():
    node = Decoder()
    owed = undisturbed(make_request("a", PROMPT, max_tokens=3))
    node.expect(max_tokens=3, n=2, attempt=2, outputs=(tuple(owed), ()))
    assert [type(m) for m in node.said if not isinstance(m, Emit)] == [Adopted]
    node.settle()
    assert [end.index for end in node.ends()] == [0, 1]
    node.said.clear()
    node.assert_at_rest()


@pytest.mark.parametrize("kind", ["submit", "prefill", "expect"])
def test_a_higher_attempt_ends_a_reservation_silently(kind):
    node = Decoder()
    node.expect(n=2)
    node.offer(0, 2)
    node.said.clear()
    request = make_request("a", PROMPT, max_tokens=1, attempt=2)
    node.dispatch({"submit": Submit(request), "prefill": Prefill(request, LEASE), "expect": Reserve(request, LEASE)}[kind])
    node.offer(2, 4, last=True, attempt=1)
    node.release(attempt=1)
    assert not node.take(Adopted)
    assert not node.ends()
    node.settle()
    node.dispatch(Forget(A, 2))
    node.settle()
    node.said.clear()
    node.assert_at_rest()


def test_a_reservation_ends_a_lower_attempt_that_runs():
    node = Decoder()
    node.dispatch(Submit(make_request("a", PROMPT, max_tokens=9)))
    node.step()
    node.said.clear()
    node.expect(attempt=2)
    assert [m.attempt for m in node.take(Reserved)] == [2]
    assert not node.ends()
    node.dispatch(Forget(A, 2))
    node.run()
    node.said.clear()
    node.assert_at_rest()


def test_a_lower_attempt_is_refused():
    node = Decoder()
    node.expect(attempt=2)
    node.said.clear()
    before = (node.leader.phase, list(node.leader.blocks), node.instance.next_deadline())
    node.dispatch(Reserve(make_request("a", PROMPT), LEASE))
    node.dispatch(Submit(make_request("a", PROMPT)))
    node.dispatch(Forget(A, 1))
    assert node.refusals() == ["duplicate_id", "duplicate_id"]
    assert (node.leader.phase, node.leader.blocks, node.instance.next_deadline()) == before


# Usage, siblings, keys


def test_what_was_pulled_is_not_told_as_cached():
    node = handed()
    node.release()
    node.settle()
    assert [end.cached_tokens for end in node.ends()] == [0]
    assert node.instance.stats.cached_tokens == 0


def test_adopted_blocks_can_be_found():
    node = handed()
    node.release()
    node.settle()
    node.dispatch(Submit(make_request("b", PROMPT, max_tokens=1)))
    node.settle()
    assert [end.cached_tokens for end in node.ends()] == [0, 12]


def test_two_that_are_handed_the_same_prompt_share_it():
    node = Decoder()
    for name in "ab":
        node.expect(name)
        node.offer(0, 4, last=True)
        node.all_pulled()
    for name in "ab":
        node.dispatch(Released(RequestId(name), 1, True))
    assert node.held == 5
    node.settle()
    assert node.outputs("a") == node.outputs("b") == undisturbed(node.request)[1:]
    node.said.clear()
    node.assert_at_rest()


def test_without_prefix_caching():
    node = Decoder(prefix_caching=False)
    node.expect(n=2)
    node.offer(0, 4, last=True)
    node.all_pulled()
    node.release()
    assert node.plans[0].new[0].computed_tokens == 14
    node.goes_on()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pool", ["kept", "lost", "other weights"])
def test_the_worker_is_lost(pool, last, after):
    """The same pool: pulls go on. Another one, or keys that begin anew: it is computed here, unless a token was told: other
    weights do not go on with it."""
    node = Decoder()
    node.expect()
    node.offer(0, 4 if last else 2, last=last)
    if after:
        node.all_pulled()
    node.lose_worker("killed")
    node.restart_worker(pool_kept=pool != "lost", fingerprint=b"other" if pool == "other weights" else b"")
    node.all_pulled()
    if pool == "other weights" and last:
        assert [(end.reason.value, end.error) for end in node.ends()] == [("error", "worker_gone")]
        return
    if not last:
        node.offer(2, 4, last=True)
        node.all_pulled()
    node.release()
    assert [m.tokens for m in node.take(Adopted)] == [14 if pool == "kept" else 0]
    node.goes_on()


def test_pulls_wait_for_the_next_worker():
    """The one that was lost may write until then."""
    node = Decoder()
    node.expect()
    node.lose_worker("timeout")
    node.offer(0, 4, last=True)
    assert not node.told
    node.restart_worker(pool_kept=True)
    assert node.kinds == ["pull"]
    node.all_pulled()
    node.release()
    assert [m.tokens for m in node.take(Adopted)] == [14]
    node.goes_on()


def test_reserved_before_the_first_worker():
    node = Decoder(start=False)
    node.expect()
    node.offer(0, 4, last=True)
    assert not node.told
    node.restart_worker()
    assert [m.tokens for m in node.take(Adopted)] == [0]
    node.goes_on()
