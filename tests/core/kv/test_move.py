"""What the cache service is told about a move: how long it may take, and of which pool it is."""

import pytest

from baton.config import TierConfig
from baton.core.kv.move import PUT_PATIENCE, Move, Peer, message_of
from baton.protocol.ids import BlockId, BlockKey, HostBlockId, MoveId, PoolIncarnation

CONFIG = TierConfig(host_blocks=4, storage=True, storage_seconds_max=3.0, pull_seconds_max=7.0)
POOL, THEIRS = PoolIncarnation(5), PoolIncarnation(6)
KEYS = (BlockKey(b"k" * 32),)


@pytest.mark.parametrize(
    ("kind", "seconds", "pool", "keys"),
    [
        ("store", 0.0, POOL, ()),
        ("load", 0.0, POOL, ()),
        ("put", PUT_PATIENCE * 3.0, PoolIncarnation(0), KEYS),  # nobody waits for it
        ("fetch", 3.0, PoolIncarnation(0), KEYS),
        ("pull", 7.0, POOL, ()),
    ],
)
def test_each_kind_has_its_time_and_names_what_it_is_about(kind, seconds, pool, keys):
    move = Move(MoveId(1), kind, KEYS, [HostBlockId(2)])
    move.device = [BlockId(3)]
    if kind == "pull":
        move.peer = Peer("unix:/x", THEIRS, (BlockId(9),))
    message = message_of(move, POOL, CONFIG, b"")
    assert (message.seconds_max, message.pool, message.keys) == (seconds, pool, keys)
    expected = ("unix:/x", THEIRS, (BlockId(9),)) if kind == "pull" else ("", PoolIncarnation(0), ())
    assert (message.peer, message.peer_pool, message.peer_blocks) == expected
