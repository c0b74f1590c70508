"""Mutants of hand-off and router (sim/mutants.py has the others and runs them): name, module, old text, new text, fault.

Only a cluster can kill them.
"""

from __future__ import annotations

CLUSTER_MUTANTS: tuple[tuple[str, str, str, str, str], ...] = (
    # The prefill end
    ("released-though-lapsed", "core.handoff.source", "mine = kept is not None and kept.finished and kept.sequence.attempt == message.attempt", "mine = True",
     "a lease that has lapsed is released as if it had not"),
    ("offered-before-computed", "core.handoff.source", "board.keep_blocks(kept, sequence.published)", "board.keep_blocks(kept, min(sequence.published + 1, len(sequence.blocks)))",
     "a block is offered that is not computed"),
    ("kept-in-a-broken-pool", "core.handoff.ends", 'nobody waits for it any longer."""\n        self._source.void()', 'nobody waits for it any longer."""',
     "what a worker that broke the protocol has left is released as kept"),
    ("kept-without-reference", "core.engine.board", "        self.cache.pool.share(more)\n", "",
     "kept blocks are not held"),
    ("prefill-ends-the-request", "core.engine.board", "handed_over = reason is FinishReason.LENGTH and sequence.admissions > 0", "handed_over = False",
     "the one token of a prompt that is handed over counts as the end"),
    # The decode end
    ("adopted-though-denied", "core.handoff.destination", "if message.kept and reservation.asked:", "if reservation.asked:",
     "a copy is believed though the release was denied"),
    ("short-pull-believed", "core.handoff.destination", "reservation.pulled[first] = (move.whole, count)", "reservation.pulled[first] = (count, count)",
     "blocks count as copied that were not"),
    ("pull-without-fence", "core.handoff.destination", "table[first:end], reservation.fence)", "table[first:end], 0)",
     "a pull writes to blocks that a plan still uses"),
    ("pull-does-not-pin", "core.kv.tiers", "        self._cache.pin(move.device)\n        self._moves", "        self._moves",
     "blocks that are being pulled are handed on when their request leaves"),
    ("reservation-never-lapses", "core.handoff.destination", "return [reservation for reservation in due if not reservation.last]", "return []",
     "room is kept for ever for a router that is gone"),
    ("tokens-counted-twice", "core.handoff.destination", "message.outputs[sequence.outputs :]", "message.outputs",
     "tokens that decode knew already are counted again"),
    ("last-token-not-computed", "core.handoff.destination", "reservation.tokens, len(sequence.tokens) - 1)", "len(sequence.tokens))",
     "more counts as copied than prefill had computed"),
    ("partial-block-published", "core.handoff.destination", "for place in range(begin, full):", "for place in range(begin, min(full + 1, len(sequence.keys))):",
     "a block that is partly filled can be found by others"),
    ("forget-ignored", "core.handoff.ends", "        self._intake.end_silently(event.request, event.attempt)\n        self._remember(event.request", "        self._remember(event.request",
     "an attempt that is over goes on"),
    # The router
    ("denied-as-granted", "core.cluster.coordinator", "Released(trip.id, trip.attempt, kept=False)", "Released(trip.id, trip.attempt, kept=True)",
     "prefill is lost, and decode is told that its copy is good"),
    ("retry-without-fencing", "core.cluster.coordinator", "            self._tell(trip.home, Forget(trip.id, trip.attempt))\n", "",
     "the next attempt begins while the one before goes on"),
    ("prefill-not-told-to-forget", "core.cluster.coordinator", "            self._tell(trip.prefill, Forget(trip.id, trip.attempt))\n", "",
     "the prompt of an attempt that is over is computed all the same"),
    ("attempt-not-raised", "core.cluster.coordinator", "        trip.attempt += 1\n", "",
     "a second attempt has the number of the first"),
    ("replay-without-tokens", "core.cluster.trip", "outputs = tuple(map(tuple, self.open.values())) if self.told else ()", "outputs = ()",
     "another instance begins from the prompt, not from what the client has"),
    ("rows-of-any-attempt", "core.cluster.delivery", "if position != len(told) or attempt != trip.attempt:", "if position != len(told):",
     "tokens of an attempt that is over are taken"),
    ("the-silent-get-work", "core.cluster.membership", "return now - self.heard_at >= seconds or bool(self.beat.fault)", "return bool(self.beat.fault)",
     "an instance that has said nothing for long gets new requests"),
    ("stalled-is-waited-for", "core.cluster.membership", "due = [member for member in self._stalled.values() if self._move_at(member) <= now and member.legs]", "due: list[Member] = []\n        self._stalled.clear()",
     "requests wait for a worker that stands still, though others work"),
    ("joined-twice", "core.cluster.router", '            self._lose(earlier, f"{hello.name} has joined again")\n', "            pass\n",
     "an instance that comes back counts twice"),
    ("wrong-leg-lost", "core.cluster.coordinator", "TripFact.HOME_LOST if trip.home is member else TripFact.PREFILL_LOST", "TripFact.PREFILL_LOST if trip.home is member else TripFact.HOME_LOST",
     "a lost decode instance counts as a lost prefill instance"),
    ("retryable-end-passed-on", "core.cluster.delivery", "        if ended.error in RETRYABLE:\n            return False\n", "",
     "an instance's loss of its worker is an error for the client"),
    ("timeout-told-as-abort", "core.cluster.trip", "if why is not None and ended.reason is FinishReason.ABORT:", "if why is None and ended.reason is None:",
     "a request whose time is over is told to be aborted (found by the rehearsal)"),
)  # fmt: skip
