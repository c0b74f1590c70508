"""The Mooncake backend against a real master: python mooncake_session.py FOLDER. Run by test_storage_mooncake.py."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
from mooncake_master import MooncakeMaster
from storage_rig import Rig, soon

from baton.errors import StorageFailed
from baton.kvcache.storage.open import open_backend


def session(folder: Path) -> None:
    master = MooncakeMaster(folder)
    try:
        rig = Rig(folder, block_bytes=190_000)
        backend = open_backend(f"mooncake://127.0.0.1:{master.port}?segment_gib=0.125", rig.layout)
        puts_and_gets(backend, rig)
        damaged_objects(backend, rig)
        assert sum(rig.put(backend, [number]) for number in range(1000, 1300)) == 300, "a store that is full evicts"
        master.stop()
        into = [memoryview(bytearray(190_000))]
        for call, blocks in ((backend.get, into), (backend.put, rig.blocks([500]))):
            with pytest.raises(StorageFailed) as failed:
                call(rig.keys([500]), blocks, soon())
            assert failed.value.reason == "unreachable"
        master.start()
        comes_back(backend, rig)
    finally:
        master.stop()


def comes_back(backend, rig) -> None:
    """The next master knows of nothing; the client meets it by itself, and brings its memory again."""
    give_up = monotonic() + 60
    while monotonic() < give_up:
        with suppress(StorageFailed):
            if rig.put(backend, [501]) == rig.get(backend, [501]) == 1:
                assert rig.has(backend, range(50)) == 0
                return
        sleep(0.2)
    raise AssertionError("a master that came back is not used")


def puts_and_gets(backend, rig) -> None:
    assert rig.has(backend, range(5)) == rig.get(backend, range(5)) == 0
    assert rig.put(backend, range(100)) == 100, "three lanes full"
    assert rig.has(backend, range(100)) == rig.get(backend, range(100)) == 100
    assert rig.has(backend, [3, 4, 999, 5]) == rig.get(backend, [3, 4, 999, 5]) == 2
    assert rig.put(backend, range(50, 110)) == 60, "what is there is no error"


def damaged_objects(backend, rig) -> None:
    name = backend._name(rig.keys([200])[0])
    for wrong in (b"short", b"x" * 190_128, b"x" * 200_000):
        assert backend._store.upsert(name, wrong) == 0
        assert rig.get(backend, [200]) == 0
        assert rig.has(backend, [200]) == 0, "what was found damaged counts as missing"
        assert rig.put(backend, [200]) == 1
        assert rig.has(backend, [200]) == rig.get(backend, [200]) == 1, "and is replaced"
    assert backend.counters()["corrupt"] == 3


if __name__ == "__main__":
    session(Path(sys.argv[1]))
    print("all is well", flush=True)
    os._exit(0)  # The client would wait for its dead master.
