"""Checks of the lower tiers against the content that each key implies. Numbers are those of docs/internals/reliability.md.

The content of every key is known beforehand: it follows from the prompts and the undisturbed outputs of all clients. So a
wrong copy is detected as soon as a lookup could find it, and not only when a request reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.engine.phase import Phase
from baton.core.engine.view import SchedulerView
from baton.core.kv.block_hash import BlockHasher
from baton.errors import InvariantBroken
from baton.protocol.ids import HostBlockId
from baton.protocol.moves import BlockMove, StorageQuery, unpack_tokens
from baton.sim.onlooker import PlansSeen
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.tags import first_tag, identity_of, next_tag, tag_bytes

FAILURES_MAX = 3
"""Failures of storage in a row after which it is not used ..."""
LEFT_ALONE_SECONDS = 1.0
"""Least seconds for which storage is not used after these failures."""

STORES_MAX = 100
"""Number of stores without a step between them. Evictions from outside, and a service that was away, cause a few."""


class KeyContents:
    """Content of each key, from the prompts and the undisturbed outputs of all clients."""

    def __init__(self, block_size: int, client_requests: list[SimulatedRequest]) -> None:
        self.requests = client_requests
        self.block_size = block_size
        self._known = 0
        self._contents: dict[bytes, bytes] = {}
        self._roots: dict[bytes, tuple[str, int]] = {}
        "Salt and weights of a key."

    def of(self, key: bytes) -> bytes | None:
        """Content of the key. None: no client's tokens give this key."""
        while key not in self._contents and self._known < len(self.requests):
            self._learn(self.requests[self._known])
            self._known += 1
        return self._contents.get(key)

    def keys_of(self, tokens: Sequence[int], last: bytes) -> list[bytes] | None:
        """Keys of the full blocks of these tokens, with salt and weights of the key `last`. None: the key is unknown."""
        if self.of(last) is None:
            return None
        salt, weights = self._roots[last]
        return list(self.chain(salt, tokens, weights))

    def _learn(self, client_request: SimulatedRequest) -> None:
        for weights in client_request.weights_known:
            for oracle in client_request.oracles_of(weights):
                chain = self.chain(client_request.client.salt, [*client_request.client.prompt, *oracle.complete()], weights)
                self._contents.update(chain)
                self._roots.update(dict.fromkeys(chain, (client_request.client.salt, weights)))

    def chain(self, salt: str, tokens: Sequence[int], weights: int = 0) -> dict[bytes, bytes]:
        """Keys and contents of the full blocks of these tokens."""
        hasher = BlockHasher(identity_of(weights), self.block_size)
        tag, parent, found = first_tag(salt.encode(), weights), hasher.root(salt.encode()), {}
        for begin in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block, content = tokens[begin : begin + self.block_size], b""
            for token in block:
                tag = next_tag(tag, token)
                content += tag_bytes(tag)
            parent = hasher.key(parent, block)
            found[bytes(parent)] = content
        return found


class TierWatch:
    def __init__(self, view: SchedulerView, plans: PlansSeen, contents: KeyContents, *, wants_tokens: bool = False) -> None:
        self._view = view
        self._wants_tokens = wants_tokens
        self._plans = plans
        self.contents = contents
        self._stores = self._steps = 0
        self.queries = 0
        "Number of queries to storage."
        self._ways: dict[int, str] = {}
        "Direction of queries, puts and fetches that are not answered, by id."
        self._sent: dict[str, dict[int, float]] = {"read": {}, "write": {}}
        "Send times of the calls whose answer counts, by direction."
        self._failed: dict[str, list[float]] = {"read": [], "write": []}
        "Send times of the calls that failed since the last success, by direction."
        self._to_host: dict[int, None] = {}
        "Stores and fetches in flight."
        self._forgotten: dict[int, None] = {}
        "Stores and fetches that were in flight when the cache was cleared."

    # Contents

    def entries(self, blocks: Sequence[HostBlockId], memory: Sequence[bytearray]) -> None:
        """11, 12: each of these host blocks that a lookup can find holds the content of its key."""
        for block in blocks:
            key = self._view.host_key(block)
            if key is not None:
                self._holds(key, memory[block], f"host block {block}")

    def put(self, key: bytes, payload: bytes) -> None:
        self._holds(key, payload, "what is put on storage")

    def _holds(self, key: bytes, payload: bytes | bytearray, what: str) -> None:
        content = self.contents.of(key)
        if content is None:
            raise InvariantBroken(f"{what} has a key that no tokens give", invariant=11)
        if content != payload:
            raise InvariantBroken(f"{what} does not hold what its key says", invariant=12)

    # Messages to the service

    def sent(self, message: BlockMove | StorageQuery, now: float, *, worker_ready: bool) -> None:
        """16: a load waits for every plan that may read or write its targets. 45: failing storage is not used for a while;
        reads and writes fail independently. 55: token ids are sent only to storage that wants them, and then always."""
        if message.tokens or self._wants_tokens:
            self._tokens(message)
        self.queries += isinstance(message, StorageQuery)
        if isinstance(message, BlockMove) and message.kind in ("store", "fetch"):
            self._to_host[message.id] = None
        if isinstance(message, BlockMove) and message.kind in ("store", "load", "pull"):
            if message.kind != "store":
                self._load(message, worker_ready)
            else:
                self._store()
            return
        way = "write" if isinstance(message, BlockMove) and message.kind == "put" else "read"
        failed = self._failed[way]
        if len(failed) >= FAILURES_MAX and now < failed[0] + LEFT_ALONE_SECONDS - 1e-6:
            raise InvariantBroken(f"storage has failed to {way} {len(failed)} times in a row and is asked again", invariant=45)
        self._ways[message.id] = way
        self._sent[way][message.id] = now

    def _tokens(self, message: BlockMove | StorageQuery) -> None:
        to_storage = isinstance(message, StorageQuery) or message.kind in ("put", "fetch")
        if bool(message.tokens) != (to_storage and self._wants_tokens):
            raise InvariantBroken(f"message {message.id} has token ids, or none, against what storage wants", invariant=55)
        if to_storage:
            tokens, keys = unpack_tokens(message.tokens), list(message.keys)
            chain = self.contents.keys_of(tokens, keys[-1]) if len(tokens) % self.contents.block_size == 0 else None
            if chain is None or chain[-len(keys) :] != keys:
                raise InvariantBroken(f"the token ids of message {message.id} are not those of its keys", invariant=55)

    def _store(self) -> None:
        """Count stores of a block. 35: unchanged blocks are not copied again and again."""
        steps = self._plans.rows
        self._stores = self._stores + 1 if steps == self._steps else 1
        self._steps = steps
        if self._stores > STORES_MAX:
            raise InvariantBroken(f"{self._stores} copies to the host, and no step between them", invariant=35)

    def _load(self, move: BlockMove, worker_ready: bool) -> None:
        if not worker_ready:
            raise InvariantBroken(f"{move.kind} {move.id} goes out while a lost worker may still write", invariant=16)
        oldest = self._view.oldest_step
        for block in move.device:
            if oldest is not None and self._plans.last_use(block) >= oldest:
                raise InvariantBroken(f"{move.kind} {move.id} goes out while a plan uses block {block}", invariant=16)

    def answered(self, number: int, error: str | None) -> None:
        """Record the result of a query, put or fetch, which the instance has read."""
        self._to_host.pop(number, None)
        way = self._ways.pop(number, None)
        if way is None:
            return
        sent = self._sent[way].pop(number, None)
        if error is None:
            self._failed[way].clear()
            self._sent[way].clear()  # calls sent before a success do not count against later ones
        elif sent is not None:
            self._failed[way].append(sent)
            self._failed[way].sort()

    def service_died(self) -> None:
        self._ways.clear()
        for sent in self._sent.values():
            sent.clear()
        self._to_host.clear()
        self._forgotten.clear()

    # A cache that is cleared

    def cleared(self) -> bool:
        """Record a cleared cache. 57: none of its blocks can be found in the host tier. True: copies to it were in flight."""
        if self._view.host_index():
            raise InvariantBroken("the cache was cleared, and the host tier has entries", invariant=57)
        self._forgotten.update(self._to_host)
        return bool(self._to_host)

    def arrived(self, move: BlockMove) -> None:
        """Record a copy that arrived. 57: copies in flight at the clearing count as cleared."""
        if move.id in self._forgotten:
            del self._forgotten[move.id]
            if any(self._view.host_key(block) is not None for block in move.host):
                raise InvariantBroken(f"{move.kind} {move.id} is of a cache that was cleared, and is found", invariant=57)

    # Actions of the service

    def copies(self, move: BlockMove) -> None:
        """Check a copy before it is made. 15: a block that is being loaded is held by its load, and no lookup finds it."""
        for block in move.device if move.kind != "store" else ():
            if not self._view.is_held(block) or self._view.is_cached(block):
                raise InvariantBroken(f"{move.kind} {move.id} writes to block {block}, which it does not hold", invariant=15)

    # The instance

    def after(self) -> None:
        """47: a suspect is computed alone."""
        for sequence in self._view.loading():
            if sequence.suspect:
                raise InvariantBroken(f"{sequence!r} is a suspect and loads", invariant=47)

    def quiet(self) -> None:
        """35: no event is left, so no sequence may wait for a lower tier."""
        for client_request in self.contents.requests:
            if any(sequence.phase is Phase.LOADING for sequence in client_request.sequences):
                raise InvariantBroken(f"{client_request.name} loads, and nothing will end that", invariant=35)

    def full_check(self, memory: Sequence[bytearray], on_storage: Mapping[bytes, object]) -> None:
        """Check all host blocks. 10: no two keys share one. 12: each holds its key's content. 17: blocks that count as stored
        were stored."""
        index = self._view.host_index()
        if len(set(index.values())) != len(index):
            raise InvariantBroken("two keys have one host block", invariant=10)
        self.entries(list(index.values()), memory)
        for key in index:
            if self._view.host_is_stored(key) and key not in on_storage:
                raise InvariantBroken("a block counts as stored that storage never took", invariant=17)
