"""Each kind of fault does what its name says, and the core survives it: every client gets its answer."""

from __future__ import annotations

import pytest

from baton.errors import InvariantBroken
from baton.sim.generate import BURST, BURST_EVERY, FAULTS, generate, kind_of
from baton.sim.reference import Reference
from baton.sim.scenario import Client, Nudge, Scenario, StepFault
from baton.sim.world import PlainWorld


def scenario(*, steps: list[StepFault] | None = None, nudges: list[Nudge] | None = None, **changes: object) -> Scenario:
    clients = [Client(f"r{number}", 0.01 * number, [1, 2, 3, number], 8, n=1 + number % 2) for number in range(4)]
    made = Scenario(seed=1, blocks=40, block_size=2, slots=4, tokens_per_step=16, clients=clients)
    made.steps, made.nudges = steps or [], nudges or []
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def run(made: Scenario) -> PlainWorld:
    world = PlainWorld(made)
    outcome = world.run()
    assert outcome.invariant is None, outcome.violation
    return world


def ends(world: PlainWorld) -> list[str]:
    return [str(end) for client_request in world.watch.all_requests for end in client_request.ended]


@pytest.mark.parametrize(
    ("seen", "made"),
    [
        ("a plan was lost", scenario(steps=[StepFault(5, "lose_plan")])),
        ("a result was lost", scenario(steps=[StepFault(5, "lose_result")])),
        ("the device was out of memory", scenario(steps=[StepFault(3, "oom", 1.0)])),
        ("the worker hung", scenario(steps=[StepFault(5, "hang")])),
        ("the worker died in its second step", scenario(nudges=[Nudge(0.0, "crash_loop", 2)])),
        ("an engine froze", scenario(nudges=[Nudge(0.05, "freeze", 20.0)])),
    ],
)
def test_everybody_is_answered_as_if_nothing_had_happened(seen: str, made: Scenario):
    world = run(made)
    assert seen in world.watch.sometimes
    assert set(ends(world)) == {"length"}


def test_a_lost_plan_with_one_in_flight_is_found_by_the_watchdog():
    world = run(scenario(steps=[StepFault(5, "lose_plan")], steps_in_flight=1))
    assert world.machine.stats.worker_losses == 1
    assert set(ends(world)) == {"length"}


def test_a_frozen_engine_ends_what_is_over_its_deadline_and_keeps_its_worker():
    made = scenario(nudges=[Nudge(0.05, "freeze", 20.0)])
    made.clients[0].timeout = 10.0
    world = run(made)
    assert world.machine.stats.worker_losses == 0
    assert ends(world)[0] == "timeout"
    assert set(ends(world)[1:]) == {"length"}


def test_what_has_begun_ends_and_the_rest_begins_with_the_other_weights():
    made = scenario(nudges=[Nudge(0.05, "reload", 1)])
    made.clients[3].at = 0.3
    world = run(made)
    begun, after = world.watch.all_requests[0], world.watch.all_requests[3]
    assert (begun.weights, begun.ended) == (0, ["error"])
    assert begun.delivered[0]
    assert (after.weights, set(after.ended)) == (1, {"length"})


@pytest.mark.parametrize("change", range(4), ids=("sizes", "layout", "weights", "epoch"))
def test_a_rank_that_says_another_hello_ends_the_start_of_its_set(change: int):
    """The simulator had one hello for all ranks, so no run reached `agreed_hello`."""
    world = run(scenario(ranks=3, nudges=[Nudge(0.05, "rank_hello", change), Nudge(0.05, "crash")]))
    assert world.watch.sometimes["a rank said another hello"] == 1
    assert world.machine.stats.worker_losses == 2, "the worker that was killed, and the set that did not agree"
    assert set(ends(world)) == {"length"}


def test_an_abort_that_comes_first_is_not_remembered():
    made = scenario()
    made.clients[3].abort_at = 0.01
    world = run(made)
    assert world.watch.sometimes["abort before submit"] == 1
    assert set(ends(world)) == {"length"}


def test_an_id_that_is_used_again_is_another_request():
    made = scenario()
    made.clients[0].again_at = 5.0
    world = run(made)
    first, second = (client_request for client_request in world.watch.all_requests if client_request.client.id == "r0")
    assert (first.name, second.name) == ("r0", "r0'")
    assert first.delivered != second.delivered
    assert set(ends(world)) == {"length"}


def test_log_probabilities_come_with_their_tokens():
    made = scenario(steps=[StepFault(6, "crash_amid")], nudges=[Nudge(0.06, "preempt", 2)])
    for client in made.clients:
        client.logprobs, client.prompt_logprobs = 1, 0
    seen = run(made).watch.sometimes
    assert seen["a log-probability was delivered"] == 6
    assert seen["a prompt's log-probabilities were delivered"] == 4


def test_restarts_in_a_row_wait_longer_and_longer():
    """What the reference demands; the runs above hold the core to it."""
    reference = Reference(scenario())
    for delay in (0.0, 0.1, 0.2, 0.4):
        reference.worker_lost(evidence=True, perhaps_absorbed=0)
        reference.restarted(delay)
    with pytest.raises(InvariantBroken, match="waits"):
        reference.restarted(0.0)


def test_growth_may_preempt_what_an_urgent_head_would():
    """An equally urgent prompt leaves the head no room, and the victim of growth is also the first victim of the head (52)."""
    outcome = PlainWorld(generate(700148)).run()
    assert outcome.invariant is None, outcome.violation


def test_host_memory_that_is_lost_while_the_instance_is_frozen():
    """The instance handles the start of the service before first, whose host memory was kept, and then the loss (12)."""
    outcome = PlainWorld(generate(1795041433005)).run()
    assert outcome.invariant is None, outcome.violation


def test_kinds_of_seeds():
    kinds = [kind_of(seed) for seed in range(1000)]
    assert kinds.count("burst") == 1000 // BURST_EVERY
    assert 70 < kinds.count("long") < 130
    assert 70 < kinds.count("tight") < 130
    for seed in range(60):
        made = generate(seed)
        if kind_of(seed) == "long":
            assert len(made.clients) >= 500
        if kind_of(seed) == "tight":
            assert made.faults == 0
            assert not any(client.timeout for client in made.clients)


def test_every_kind_of_fault_is_drawn():
    kinds = {fault.kind for seed in range(400) for fault in (*generate(seed).steps, *generate(seed).nudges)}
    wanted = set(FAULTS) - {"stall", "abort", "poison", "nan", "again", "stop_string"} - {"crash"}
    assert wanted <= kinds


@pytest.mark.slow
def test_ten_thousand_requests_at_once():
    seed = BURST_EVERY - 1
    world = run(generate(seed))
    assert len(world.watch.all_requests) == BURST + 3
    assert set(ends(world)) == {"length"}
