"""The worker's loop with steps that are done late: results in order, pings, the end."""

from __future__ import annotations

import os
import socket
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from late_executor import DEADLINE_SECONDS, LateExecutor, expected
from rig import TINY
from test_model_runner import new, plan

from baton.grammar.vocabulary import Vocabulary
from baton.kvpool.layout import KVKind
from baton.kvpool.pool import KVPool
from baton.protocol.codec import encode
from baton.protocol.control import Ping, Pong
from baton.protocol.grammar import Grammar
from baton.protocol.progress import ProgressWord
from baton.protocol.request import SamplingParams
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.worker import step_loop
from baton.runtime.worker.step_loop import StepLoop, Waiter
from baton.worker.grammar_masks import GrammarMasks
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner
from baton.worker.step_rules import grammar_masks


class Worker:
    """The loop in a thread, the engine's end of its channel, and the executor."""

    def __init__(self, executor: LateExecutor) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_SECONDS)
        self.executor = executor
        self.engine = BlockingChannel(ours)
        ours.settimeout(DEADLINE_SECONDS)  # a BlockingChannel has none
        self._sockets = ours, theirs
        self.runner = ModelRunner(executor, KVPool.create(kv_layout(TINY, 4, KVKind("float32")), 16), slots=4)
        self.word = ProgressWord.create()
        self.error: BaseException | None = None
        channel = BlockingChannel(theirs)
        self._thread = Thread(target=self._run, args=(StepLoop(self.runner, channel, self.word),), daemon=True)
        self._thread.start()

    def _run(self, loop: StepLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            self.error = error
            self._sockets[1].close()

    def quiet(self) -> bool:
        """Nothing comes by itself: what was to come has come."""
        self.engine.send(Ping(99))
        return self.engine.receive() == Pong(99)

    def end(self) -> None:
        self._sockets[0].close()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()
        self.runner.close()


@pytest.fixture(params=[1, 2])
def prompt_worker(request):
    """Steps are done at once."""
    worker = Worker(LateExecutor(request.param, at_once=True))
    yield worker
    worker.end()


@pytest.fixture
def worker():
    worker = Worker(LateExecutor(2))
    yield worker
    for late in worker.executor.launched:
        late.done.set()
    worker.end()


def test_results_come_in_order_however_many_are_ahead(prompt_worker):
    answers = expected([1, 2, 3], 9)
    prompt_worker.engine.send(plan(1, new=(new(0, [1, 2, 3]),), run=[(0, 3)]))
    for step in range(2, 10):
        prompt_worker.engine.send(plan(step, run=[(0, 1)]))
    results = [prompt_worker.engine.receive() for _ in range(9)]
    assert [result.step for result in results] == list(range(1, 10))
    assert [result.values[0] for result in results] == answers
    assert prompt_worker.quiet()
    assert prompt_worker.word.value == 9, "each of them shows that the worker gets on"


def test_a_plan_is_launched_while_the_one_before_is_computed(worker):
    first, second, third = expected([5], 3)
    for step in (1, 2, 3):
        worker.engine.send(plan(step, new=(new(0, [5]),) if step == 1 else (), run=[(0, 1)]))
    worker.executor.launches.wait(2)
    assert worker.executor.collected == 0
    worker.executor.launched[0].done.set()
    assert worker.engine.receive().values == (first,)
    worker.executor.launches.wait(3)
    worker.executor.launched[1].done.set()
    worker.executor.launched[2].done.set()
    assert [worker.engine.receive().values for _ in range(2)] == [(second,), (third,)]
    assert [late.fed_back for late in worker.executor.launched] == [[], [0], [0]]


def test_the_younger_step_that_is_done_first_waits_for_the_older(worker):
    first, second = expected([5], 2)
    worker.engine.send(plan(1, new=(new(0, [5]),), run=[(0, 1)]))
    worker.engine.send(plan(2, run=[(0, 1)]))
    worker.executor.launches.wait(2)
    worker.executor.launched[1].done.set()
    worker.executor.launched[0].done.set()
    assert [worker.engine.receive().values for _ in range(2)] == [(first,), (second,)]


def test_a_result_is_sent_without_another_plan(worker):
    worker.engine.send(plan(1, new=(new(0, [5]),), run=[(0, 1)]))
    worker.executor.launches.wait(1)
    assert worker.quiet(), "a ping is answered while a step is under way"
    worker.executor.launched[0].done.set()
    assert worker.engine.receive().values == (expected([5], 1)[0],)
    assert worker.quiet()


def test_sampling_on_the_host_is_not_run_ahead(worker):
    settings = (SamplingParams(presence_penalty=0.5),)
    worker.executor.at_once = True
    first = plan(1, new=(new(0, [5]),), sampling=settings, run=[(0, 1)])
    plans = [first, *(plan(step, sampling=(), run=[(0, 1)]) for step in (2, 3))]
    # In one piece: the loop has the next plan at hand before it looks whether the step before is done.
    worker.engine._socket.sendall(b"".join(encode(each) for each in plans))
    assert [worker.engine.receive().values[0] for _ in range(3)] == expected([5], 3)
    assert [late.fed_back for late in worker.executor.launched] == [[], [], []]


def test_a_plan_that_waits_for_tokens_is_launched_before_they_are_sent():
    """The device is idle from the end of the first step to the launch of the second."""
    executor, order = LateExecutor(2, at_once=True), list[str]()
    runner = ModelRunner(executor, KVPool.create(kv_layout(TINY, 4, KVKind("float32")), 16), slots=4)
    launch = executor.launch
    executor.launch = lambda *given: (order.append("launch"), launch(*given))[1]
    channel = SimpleNamespace(send=lambda result: order.append(f"result {result.step}"))
    loop = StepLoop(runner, channel, ProgressWord.create())
    settings = (SamplingParams(presence_penalty=0.5),)
    with Waiter() as loop._waiter:
        loop._on_message(plan(1, new=(new(0, [5]),), sampling=settings, run=[(0, 1)]))
        for step in (2, 3):
            loop._on_message(plan(step, run=[(0, 1)]))
        loop._finish()
    assert order == ["launch", "launch", "result 1", "launch", "result 2", "result 3"]
    assert runner.batch.outputs(0).tolist()[:-1] == expected([5], 3)[:2]
    runner.close()


def test_a_result_is_sent_before_the_next_launch_waits_for_a_mask():
    """A grammar may compile for seconds, and other sequences of the step have their tokens."""
    executor, order, sent = LateExecutor(2, at_once=True), list[str](), Event()
    tokens = [bytes([byte]) for byte in range(TINY.vocab_size)]
    grammars = GrammarMasks(lambda: Vocabulary(tokens, [0], len(tokens)))
    runner = ModelRunner(executor, KVPool.create(kv_layout(TINY, 4, KVKind("float32")), 16), slots=4, grammars=grammars)
    launch = executor.launch

    def with_masks(batch, sampling):
        grammar_masks(sampling, np.arange(len(batch.due)), TINY.vocab_size)
        order.append("launch")
        return launch(batch, sampling)

    def send(result):
        order.append(f"result {result.step}")
        sent.set()

    executor.launch = with_masks
    loop = StepLoop(runner, SimpleNamespace(send=send), ProgressWord.create())
    settings = (SamplingParams(grammar=Grammar("lark", "start: /[\\x01-@]+/", ends=(0,))),)
    with Waiter() as loop._waiter:
        loop._on_message(plan(1, new=(new(0, [5]),), sampling=settings, run=[(0, 1)]))
        grammars._threads.submit(sent.wait, DEADLINE_SECONDS / 4)  # the next mask waits for this
        loop._on_message(plan(2, run=[(0, 1)]))
        assert order == ["launch", "result 1", "launch"]
        loop._finish()
    assert order[3:] == ["result 2"]
    runner.close()


def test_a_result_is_sent_although_the_next_launch_fails(worker):
    """Without it the engine would suspect the sequences of the step that ended well."""
    launch = worker.executor.launch

    def launch_once(*given):
        if worker.executor.launched:
            raise RuntimeError("no launch")
        return launch(*given)

    worker.executor.launch, worker.executor.at_once = launch_once, True
    settings = (SamplingParams(presence_penalty=0.5),)
    first = plan(1, new=(new(0, [5]),), sampling=settings, run=[(0, 1)])
    worker.engine._socket.sendall(b"".join(encode(each) for each in (first, plan(2, run=[(0, 1)]))))
    assert worker.engine.receive().values == (expected([5], 1)[0],)
    assert worker.engine.receive() is None, "the channel is closed"
    assert "no launch" in str(worker.error)


def test_only_the_last_result_is_held_back_until_the_launch():
    """Earlier ones do not wait for the steps behind them."""
    executor, order = LateExecutor(3, at_once=True), list[str]()
    runner = ModelRunner(executor, KVPool.create(kv_layout(TINY, 4, KVKind("float32")), 16), slots=4)
    launch, collect = executor.launch, executor.collect
    executor.launch = lambda *given: (order.append("launch"), launch(*given))[1]
    executor.collect = lambda *given: (order.append("collect"), collect(*given))[1]
    loop = StepLoop(runner, SimpleNamespace(send=lambda result: order.append(f"result {result.step}")), ProgressWord.create())
    with Waiter() as loop._waiter:
        loop._on_message(plan(1, new=(new(0, [5]),), run=[(0, 1)]))
        loop._on_message(plan(2, run=[(0, 1)]))
        settings = (SamplingParams(presence_penalty=0.5),)
        loop._on_message(plan(3, new=(new(1, [7], blocks=(9,)),), sampling=settings, run=[(0, 1), (1, 1)]))
        loop._finish()
    assert order == ["launch", "launch", "collect", "result 1", "collect", "launch", "result 2", "collect", "result 3"]
    runner.close()


def test_the_end_of_the_channel_while_steps_are_under_way(worker):
    worker.engine.send(plan(1, new=(new(0, [5]),), run=[(0, 1)]))
    worker.executor.launches.wait(1)
    worker.executor.launched[0].done.set()
    worker.end()
    assert worker.error is None or isinstance(worker.error, (BrokenPipeError, ConnectionResetError))
    assert worker.executor.closed


def test_an_error_of_a_step_ends_the_loop(worker):
    def broken() -> None:
        raise RuntimeError("device lost")

    worker.executor.on_wait = broken
    worker.engine.send(plan(1, new=(new(0, [5]),), run=[(0, 1)]))
    assert worker.engine.receive() is None, "the channel is closed"
    assert "device lost" in str(worker.error)


def test_the_end_does_not_wait_for_a_device_that_hangs(monkeypatch):
    monkeypatch.setattr(step_loop, "END_SECONDS_MAX", 0.01)
    begun, go_on = Event(), Event()
    with Waiter() as waiter:
        waiter.watch(SimpleNamespace(wait=lambda: (begun.set(), go_on.wait(DEADLINE_SECONDS))))
        assert begun.wait(DEADLINE_SECONDS)
    assert waiter._thread.is_alive(), "it was waited for"
    go_on.set()
    waiter._thread.join(DEADLINE_SECONDS)
    os.close(waiter.fd)  # it could not be closed under the thread


def test_nothing_is_left_of_a_waiter():
    before = len(os.listdir("/proc/self/fd"))
    with Waiter() as waiter:
        waiter.watch(SimpleNamespace(wait=lambda: None))
        waiter.take_one()
    assert len(os.listdir("/proc/self/fd")) == before
