"""Mutants of the lower tiers (mutants.py has the others and runs them): name, module, old text, new text, fault.

Only a scenario with a cache service can kill them.
"""

from __future__ import annotations

TIER_MUTANTS: tuple[tuple[str, str, str, str, str], ...] = (
    # Copies down
    ("copy-of-a-block-handed-on", "core.kv.tiers", "not move.void and pool.generation(block) == generation", "not move.void",
     "a copy counts though its block was handed on meanwhile"),
    ("generation-taken-too-late", "core.kv.tiers", "wanted = {key: entry for key, entry in to_store.items() if pool.generation(entry[0]) == entry[1]}", "wanted = {key: (e[0], pool.generation(e[0]), e[2]) for key, e in to_store.items()}",
     "a block that was handed on in the event that published it is copied"),
    ("short-copy-believed", "core.kv.tiers", "            place < moved and not move.void", "            not move.void",
     "a store that ended early is found whole"),
    ("put-without-pin", "core.kv.tiers", 'move = Move(self._number(), "put", keys, self.host.pin(keys))', 'move = Move(self._number(), "put", keys, [self.host._block_of[k] for k in keys])',
     "a block is evicted while it is being written to storage"),
    ("put-believed-whole", "core.kv.tiers", "for block in move.host[:moved]:", "for block in move.host:",
     "what storage refused counts as stored, and is never put again"),
    # The host tier
    ("host-evicts-pinned", "core.kv.host_tier", "            if not self._pins[block]:\n                victims", "            if block >= 0:\n                victims",
     "a block is evicted while it is being loaded"),
    ("host-memory-lost-unnoticed", "core.kv.tiers", "        if not kept:\n", "        if kept is None:\n",
     "the index of the host tier survives its memory"),
    ("host-insert-replaces", "core.kv.host_tier", "        if key in self._block_of:\n            self._free", "        if not key:\n            self._free",
     "two copies of one block: the second takes the first one's place, which is lost"),
    ("host-hit-behind-a-hole", "core.kv.host_tier", "while place < limit and keys[place] in self._block_of:", "while place < limit and (keys[place] in self._block_of or place > start):",
     "blocks behind a hole count as hits"),
    # A cache that is cleared
    ("cleared-copies-are-found", "core.kv.tiers", 'move.void = move.void or move.kind in ("store", "fetch")', "move.void = move.void",
     "what is on its way to the host when the cache is cleared is found afterwards"),
    ("clear-leaves-what-is-read", "core.kv.tiers", "        self.host.forget()\n", "        self.host.evict(len(self.host))\n",
     "what is being read when the cache is cleared is found afterwards"),
    ("orphans-are-lost", "core.kv.host_tier", "            if not self._pins[block] and self._key_of[block] is None:\n", "            if self._pins[block] < 0:\n",
     "a block that was forgotten while it was read is never free again"),
    # Loads
    ("load-without-fence", "core.kv.tiers", "if oldest_in_flight is None or m.fence is None or m.fence < oldest_in_flight]", "if m.fence is not None]",
     "a load does not wait for plans that still write to its targets"),
    ("fence-off-by-one", "core.kv.tiers", "m.fence < oldest_in_flight]", "m.fence <= oldest_in_flight]",
     "a load goes out with the last plan that writes to its targets"),
    ("load-does-not-pin", "core.kv.tiers", "        self._cache.pin(move.device)\n", "",
     "the targets of a load are free when its request leaves"),
    ("short-load-believed", "core.engine.loading", "publish_loaded(self._board, sequence, load.begin, arrived)", "publish_loaded(self._board, sequence, load.begin, len(sequence.keys) - load.begin)",
     "blocks that were not loaded are published"),
    ("load-counts-ahead", "core.engine.loading", "max(sequence.published, begin + count)", "max(sequence.published, begin + count + 1)",
     "a block too many counts as computed after a load"),
    ("waiters-forgotten", "core.engine.loading", "        self._release(waiters)\n\n    def _still_waiting", "        self._release(waiters[:1])\n\n    def _still_waiting",
     "of those that wait for one load only the first goes on"),
    ("lease-outlives-request", "core.engine.board", "        sequence.load = None\n        self.drop_lease(sequence)\n        if self.tiers.up:", "        sequence.load = None\n        if self.tiers.up:",
     "one that leaves while it loads keeps its blocks"),
    ("result-taken-twice", "core.kv.tiers", "        del self._moves[result.id]\n", "",
     "a result that comes twice is taken twice"),
    ("suspects-load", "core.engine.loading", "self._tiers.up and not sequence.suspect and", "self._tiers.up and",
     "a suspect waits for a copy, and so do all who are held for it"),
    ("load-hides-the-prompt", "core.engine.loading", " and not sequence.must_compute_prompt", "",
     "a prompt whose log-probabilities are wanted is loaded"),
    # Storage
    ("fetch-believed-whole", "core.kv.tiers", "self._insert(move, [place < moved for place in range(len(move.host))]", "self._insert(move, [True for place in range(len(move.host))]",
     "what storage did not bring, or brought damaged, is found"),
    ("storage-waited-for-for-ever", "core.engine.loading", "while self._deadlines and (self._deadlines[0][0] <= now or self._is_over(self._deadlines[0][2])):", "while self._deadlines and self._is_over(self._deadlines[0][2]):",
     "whoever asked storage waits until it answers"),
    ("failures-not-counted", "core.kv.tiers", "circuit.ended(move.attempt, result.error, now)", "circuit.ended(move.attempt, None, now)",
     "a storage that fails, or is full, is asked again and again"),
    # Token ids for a storage that wants them
    ("prefix-told-backwards", "core.kv.token_links", 'b"".join(reversed(parts))', 'b"".join(parts)',
     "the blocks before a run are told in the order in which their links were followed"),
    ("chains-told-as-one", "core.kv.token_links", "chain = by_last.pop(link.parent, None) if link.place else None", "chain = chains[-1] if chains else None",
     "blocks of several sequences are put as if they were one after the other"),
    ("ids-of-a-former-block", "core.kv.token_links", "self._of_host[block] = link", "self._of_host[block] = self._of_host[block] or link",
     "a host block keeps the token ids of what it held first"),
    ("more-told-than-fetched", "core.kv.tiers", "        run = run.first(len(host))\n", "",
     "a fetch that is cut to the room there is names the token ids of all that was found"),
    # The service's life
    ("loads-outlive-service", "core.engine.loading", "            self._asked.pop(number, None)\n            self._end(number, 0)\n", "            self._asked.pop(number, None)\n",
     "whoever loads when the service dies waits for ever"),
    ("hang-unnoticed", "core.kv.tiers", "if deadline is None or deadline > now:", "if deadline is None or deadline <= now:",
     "a service that hangs is waited for for ever"),
    ("hang-judged-before-reading", "core.engine.instance", "        self._loader.expire(now)\n", "        self._loader.expire(now)\n        if self.board.tiers.hangs(now):\n            self._effects.append(RestartCache(\"late\"))\n",
     "after a pause of the engine a service is killed whose answer is here, unread"),
    ("freed-before-dead", "core.engine.instance", "        if self.board.tiers.hangs(self._now):\n", "        if self.board.tiers.hangs(self._now):\n            self._loader.service_lost()\n",
     "the targets of a service that hangs are given back before it is dead"),
    ("broken-pool-kept", "core.engine.instance", "            self._pool = None  #", "            pass  #",
     "the pool of a worker that broke the protocol is believed"),
)  # fmt: skip
