"""Actions on an instance from outside, at a time of the scenario (`Nudge`)."""

from __future__ import annotations

from baton.core.events import EvictSome, ForgetCache, Pause, PreemptSome, Resume
from baton.sim.instance import SimulatedInstance
from baton.sim.instance_watch import InstanceWatch
from baton.sim.scenario import Nudge

MESSAGES = ("preempt", "evict", "clear", "clock", "pause", "resume", "sleep")
"""An engine that is frozen finds these when it reads again."""
PAUSE, RESUME = 3, 4
"""Numbers of orders."""


def nudge(instance: SimulatedInstance, each: Nudge, watch: InstanceWatch) -> bool:
    """Perform the nudge. False: the engine is frozen, and the caller must try again."""
    engine, amount = instance.engine, max(1, int(each.amount))
    assert engine is not None
    if instance.frozen_until is not None and each.kind in MESSAGES:
        return False
    match each.kind:
        case "preempt":
            watch.forced()
            engine.dispatch(PreemptSome(amount))
        case "evict":
            engine.dispatch(EvictSome(amount))
        case "clear" if engine.cache is not None:
            engine.dispatch(ForgetCache(0))
            if engine.tiers.cleared():
                watch.saw("the cache was cleared with copies under way")
        case "crash":
            engine.kill_worker()
        case "reload":
            instance.weights = int(each.amount)
            engine.kill_worker()
        case "cache_crash" if engine.cache is not None:
            engine.cache.crash(kept=each.amount < 0.6)
        case "cache_hang" if engine.cache is not None:
            engine.cache.hang()
        case "clock":
            watch.steps.excuse()
            watch.saw("the clock jumped back" if each.amount < 0 else "the clock jumped ahead")
            engine.jump(each.amount)
        case "pause":
            engine.dispatch(Pause(each.amount, PAUSE))
        case "resume":
            engine.dispatch(Resume(RESUME))
        case "sleep":
            instance.sleep(each.amount)
        case "restart_fails":
            engine.process.fail_restarts(amount)
        case "restart_hangs":
            engine.process.hang_restart()
        case "rank_hello":
            engine.process.change_hello(int(each.amount))
        case "crash_loop":
            engine.process.loop(amount)
        case "freeze":
            watch.steps.excuse()
            instance.freeze(each.amount)
    return True
