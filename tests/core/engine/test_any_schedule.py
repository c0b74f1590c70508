"""Whatever the schedule, the output is the undisturbed one.

Hypothesis draws a small instance and a list of disturbances; the harness compares every token, every end and every law of
the core after every event; at the end the instance is left alone, finishes everything, and holds nothing.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton.core.engine.worker_watch import WorkerState
from baton.core.events import EvictSome, Pause, Resume, StepDone

from .harness import VOCAB, Driver

few_tokens = st.lists(st.sampled_from([0, 1, 7]), min_size=1, max_size=14)  # few ids: prompts share prefixes


class AnySchedule(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(8, 24),
        block_size=st.sampled_from([1, 2, 4]),
        slots=st.integers(1, 4),
        more_tokens=st.integers(0, 12),
        chunk=st.none() | st.integers(1, 6),
        beside=st.none() | st.integers(1, 6),
        ahead=st.integers(1, 3),
        reserve=st.sampled_from([0.0, 0.3, 1.0]),
        eviction=st.sampled_from(["lru", "lfu"]),
        prefix_caching=st.booleans(),
    )
    def start(self, blocks, block_size, slots, more_tokens, chunk, beside, ahead, reserve, eviction, prefix_caching):
        self.driver = Driver(
            blocks=blocks,
            block_size=block_size,
            slots=slots,
            tokens_per_step=slots + more_tokens,
            chunk_tokens_max=chunk,
            prefill_tokens_beside_decodes=beside,
            steps_in_flight=ahead,
            reserve_start=reserve,
            reserve_learning=0.1,
            eviction=eviction,
            prefix_caching=prefix_caching,
            worker_restarts_max=10_000,
        )
        self.submitted = 0
        self.disturbed: list[str] = []
        "Requests that were aborted, or may have been."
        self.old_results = []

    @rule(
        prompt=few_tokens,
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        min_tokens=st.integers(0, 4),
    )
    def submit(self, prompt, max_tokens, n, priority, stop, min_tokens):
        self.submitted += 1
        self.driver.submit(
            f"r{self.submitted}",
            prompt,
            max_tokens=max_tokens,
            n=n,
            priority=priority,
            stop_token_ids=tuple(stop),
            min_tokens=min_tokens,
        )

    @precondition(lambda self: self.driver.plans)
    @rule()
    def execute(self):
        self.old_results.append(self.driver.execute())

    @precondition(lambda self: self.driver.plans or self.driver.results)
    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            if self.driver.plans or self.driver.results:
                self.driver.step()

    @precondition(lambda self: self.driver.results)
    @rule(place=st.integers(0, 5))
    def deliver(self, place):
        self.driver.deliver(place % len(self.driver.results))

    @precondition(lambda self: self.old_results)
    @rule(place=st.integers(0, 50))
    def repeat(self, place):
        result = self.old_results[place % len(self.old_results)]
        if result not in self.driver.results:
            self.driver.dispatch(StepDone(result))

    @rule(count=st.integers(1, 4))
    def preempt(self, count):
        self.driver.preempt(count)

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        self.driver.dispatch(EvictSome(count))

    @precondition(lambda self: self.driver.requests)
    @rule(place=st.integers(0, 50), index=st.none() | st.integers(0, 2))
    def abort(self, place, index):
        name = list(self.driver.requests)[place % len(self.driver.requests)]
        self.disturbed.append(name)
        self.driver.abort(name, index)

    @rule(pool_kept=st.booleans())
    def restart(self, pool_kept):
        self.driver.lose_worker()
        self.driver.restart_worker(pool_kept=pool_kept)

    @rule(resume=st.booleans())
    def pause(self, resume):
        self.driver.dispatch(Resume() if resume else Pause())

    def teardown(self):
        driver = getattr(self, "driver", None)
        if driver is None:
            return
        assert driver.instance.worker.state is WorkerState.READY
        driver.run()
        driver.assert_at_rest()
        crashed = [name for (name, _), end in driver.ended.items() if end.reason == "error"]
        assert len(crashed) <= 4 * driver.instance.stats.worker_losses
        for name in driver.requests:
            if name not in self.disturbed and name not in crashed:
                driver.assert_answered(name)


AnySchedule.TestCase.settings = settings(stateful_step_count=40)
TestAnySchedule = AnySchedule.TestCase
