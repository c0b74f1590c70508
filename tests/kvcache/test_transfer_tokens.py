"""Token ids on their way from messages to the backend: only where it wants them."""

from __future__ import annotations

import pytest

from baton.kvcache.transfer import Transfer
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.ids import BlockKey, HostBlockId, MoveId
from baton.protocol.moves import BlockMove, StorageAnswer, StorageQuery, pack_tokens

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=4, block_size=4, dtype="int8", format="int8-fours")
KEYS = (BlockKey(b"a" * 32), BlockKey(b"b" * 32))


class Recorder:
    def __init__(self, wants_tokens: bool) -> None:
        self.wants_tokens = wants_tokens
        self.calls: list[tuple[str, tuple[int, ...] | None]] = []

    def contains_prefix(self, keys, deadline, tokens=None) -> int:
        return self._record("contains_prefix", keys, tokens)

    def get(self, keys, into, deadline, tokens=None) -> int:
        return self._record("get", keys, tokens)

    def put(self, keys, blocks, deadline, tokens=None) -> int:
        return self._record("put", keys, tokens)

    def _record(self, call, keys, tokens) -> int:
        self.calls.append((call, tokens))
        return len(keys)

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("wants", [True, False])
def test_every_call_carries_the_ids_or_none_does(wants: bool):
    backend, answers = Recorder(wants), []
    host = KVPool.create(LAYOUT, 4, "baton-test")
    transfer = Transfer(host, backend, answers.append)
    ids = tuple(range(7, 19))  # three blocks: one before, two that are meant
    packed = pack_tokens(ids) if wants else b""
    blocks = (HostBlockId(0), HostBlockId(1))
    try:
        transfer.submit(StorageQuery(MoveId(1), KEYS, 5.0, packed)).result(30)
        for number, kind in ((2, "put"), (3, "fetch")):
            move = BlockMove(MoveId(number), kind, blocks, keys=KEYS, seconds_max=5.0, tokens=packed)
            transfer.submit(move).result(30)
    finally:
        transfer.close()
        host.close()
    expected = ids if wants else None
    assert backend.calls == [("contains_prefix", expected), ("put", expected), ("get", expected)]
    assert answers[0] == StorageAnswer(MoveId(1), 2)
    assert [answer.moved for answer in answers[1:]] == [2, 2]
