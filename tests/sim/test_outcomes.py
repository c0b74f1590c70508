"""Checks by outcome: each is needed. Its mutants break nothing else that the simulator checks, so they live without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from baton.sim.scenario import Scenario

SEEDS = Path(__file__).parent.parent / "seeds"

WITHOUT = {
    53: "from baton.sim.cluster.reservation_watch import ReservationWatch as m; m._check_urgent = lambda *_: None; "
    "from baton.sim.urgency_watch import UrgencyWatch; UrgencyWatch.planned = lambda *_: None",
    62: "import baton.sim.cluster.router as m; m.check_idle = lambda *_: None",
    63: "import baton.sim.cluster.front as m; m.FrontProcess._check_sent_once = lambda *_: None; "
    "from baton.sim.cluster.watch import ClusterWatch; ClusterWatch.check_handoffs = lambda *_: None",
    64: "import baton.sim.cluster.watch as m; m._holds = lambda *_: False",
    65: "import baton.sim.world as m; m.check_tier_outcomes = lambda *_: None",
    67: "from baton.sim.cluster.reservation_watch import ReservationWatch as m; m.handled = lambda *_: None",
    68: "from baton.sim.world import PlainWorld as m; m._close_circuits = lambda *_: None",
    74: "from baton.sim.tier_outcomes import RepeatedPrompt as m; m.check = lambda *_: None",
    76: "from baton.sim.order_watch import OrderWatch as m; m.answered = m.at_rest = lambda *_: None",
    77: "from baton.sim.engine import SimulatedEngine as m; m._check_idle_hang = lambda *_: None",
}
"""By invariant: code that turns its check off."""

MUTANTS = {
    "prompts-before-urgent-heads": 53,
    "urgent-reservation-waits": 53,
    "idle-though-others-wait": 62,
    "kept-none": 63,
    "front-asks-the-same-engine-twice": 63,
    "handed-over-and-computed-again": 64,
    "nothing-is-copied-down": 65,
    "storage-is-never-asked": 65,
    "least-urgent-reservation-first": 67,
    "reservation-bounces": 67,
    "room-that-is-free-is-not-given": 67,
    "circuit-never-closes": 68,
    "storage-is-not-tried-again": 68,
    "host-copies-are-not-found": 74,
    "slow-loads-are-not-tried-again": 74,
    "what-storage-has-is-not-fetched": 74,
    "wake-answered-too-early": 76,
    "idle-hang-is-kept": 77,
}


def test_the_mutants_are_kept_for_these_checks():
    assert {name: Scenario.load(SEEDS / f"{name}.json").fails for name in MUTANTS} == MUTANTS


LIVES = """
import os, sys
from pathlib import Path
import baton.sim.run
from baton.sim.mutants import find, replay_forked
without, mutants, folder = eval(sys.argv[1])
for name, invariant in mutants.items():
    if not os.fork():
        exec(without[invariant])
        print(name, replay_forked(find(name), Path(folder, f"{name}.json")).invariant, flush=True)
        os._exit(0)
    os.wait()
"""


def test_without_its_check_a_mutant_lives():
    """One process that has loaded the simulator, and two forks for each mutant: without the check, and with the mutant."""
    arguments = repr((WITHOUT, MUTANTS, str(SEEDS)))
    ran = subprocess.run([sys.executable, "-c", LIVES, arguments], capture_output=True, check=False, text=True, timeout=240)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert dict(line.split() for line in ran.stdout.splitlines()) == dict.fromkeys(MUTANTS, "None")
