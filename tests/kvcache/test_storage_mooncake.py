"""The Mooncake backend: against a real master where Mooncake is installed, and against a client that misbehaves everywhere."""

import ctypes
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from mooncake_master import why_not
from redis_server import free_port
from storage_rig import layout_of

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage import mooncake_store
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.mooncake_store import MooncakeBackend, MooncakeConfig
from baton.kvcache.storage.open import open_backend

WHY_NOT = why_not()
needs_mooncake = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@needs_mooncake
def test_against_a_real_master(tmp_path):
    """In a process of its own: the client leaves threads behind, and takes a crash of its own with it."""
    session = Path(__file__).with_name("mooncake_session.py")
    command = [sys.executable, str(session), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout.endswith("all is well\n"), ran.stdout + ran.stderr[-3000:]


def test_no_master_is_found_out_at_the_first_call_and_not_before(rig):
    config = MooncakeConfig(host="127.0.0.1", port=free_port())
    backend = MooncakeBackend(config, rig.layout, lambda: pytest.fail("no client is made"))
    for _ in range(2):
        with pytest.raises(StorageFailed) as failed:
            rig.get(backend, [0])
        assert failed.value.reason == "unreachable"


class FakeStore:
    """A client as we know it, over a dictionary."""

    def __init__(self):
        self.objects, self.answer, self.wait = {}, None, None

    def setup(self, *_):
        return 0

    def register_buffer(self, *_):
        return 0

    def _hang(self):
        if self.wait is not None:
            self.wait.wait(60)

    def batch_is_exist(self, names):
        self._hang()
        return [self.answer or int(name in self.objects) for name in names]

    def batch_get_into(self, names, addresses, sizes):
        self._hang()
        return [self.answer or self._read(*each) for each in zip(names, addresses, sizes, strict=True)]

    def _read(self, name, address, size):
        if name not in self.objects:
            return -704
        ctypes.memmove(address, self.objects[name], min(size, len(self.objects[name])))
        return len(self.objects[name]) if len(self.objects[name]) <= size else -600

    def batch_put_from(self, names, addresses, sizes):
        self._hang()
        for name, address, size in zip(names, addresses, sizes, strict=True):
            if not self.answer:
                self.objects.setdefault(name, ctypes.string_at(address, size))
        return [self.answer or 0 for _ in names]

    def batch_upsert_from(self, names, addresses, sizes):
        for name in names:
            self.objects.pop(name, None)
        return self.batch_put_from(names, addresses, sizes)

    def close(self):
        pass


@pytest.fixture
def fake():
    return FakeStore()


@pytest.fixture
def backend(fake, rig, monkeypatch):
    probe = MagicMock()
    probe.__enter__.return_value.getsockname.return_value = ("127.0.0.1", 1)
    monkeypatch.setattr(mooncake_store.socket, "create_connection", lambda *_, **__: probe)
    made = MooncakeBackend(MooncakeConfig(host="master"), rig.layout, lambda: fake)
    yield made
    made.close()


@pytest.mark.parametrize(("answer", "reason"), [(-200, "full"), (-900, "unreachable"), (-901, "timeout"), (-800, "io")])
def test_answers_are_typed(fake, backend, rig, answer, reason):
    rig.put(backend, [0])
    fake.answer = answer
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, [1])
    assert failed.value.reason == reason
    with pytest.raises(StorageFailed) as failed:
        rig.get(backend, [0])
    assert failed.value.reason == reason
    with pytest.raises(StorageFailed):
        rig.has(backend, [0])


def test_a_transfer_that_comes_late_writes_to_no_block(fake, backend, rig):
    rig.put(backend, range(3))
    fake.wait = threading.Event()
    into = [memoryview(bytearray(1000)) for _ in range(3)]
    with pytest.raises(StorageFailed) as failed:
        backend.get(rig.keys(range(3)), into, Deadline.after(0.05))
    assert failed.value.reason == "timeout"
    fake.wait.set()
    assert rig.get(backend, range(3)) == 3
    assert all(block == bytes(1000) for block in into)


def test_when_all_lanes_are_stuck_nothing_more_is_begun(fake, backend, rig):
    rig.put(backend, [0])
    fake.wait = threading.Event()
    for _ in range(mooncake_store.LANES + 2):
        with pytest.raises(StorageFailed) as failed:
            backend.contains_prefix(rig.keys([0]), Deadline.after(0.02))
        assert failed.value.reason == "timeout"
    fake.wait.set()
    assert rig.has(backend, [0]) == 1


def test_a_damaged_object_is_replaced(fake, backend, rig):
    rig.put(backend, range(2))
    name = backend._name(rig.keys([1])[0])
    fake.objects[name] = fake.objects[name][:-1] + b"?"
    assert rig.get(backend, range(2)) == 1
    assert rig.has(backend, range(2)) == 1
    assert rig.put(backend, range(2)) == 2
    assert rig.has(backend, range(2)) == rig.get(backend, range(2)) == 2


@pytest.mark.parametrize(("step", "reason"), [("setup", "unreachable"), ("register_buffer", "io")])
def test_a_client_that_could_not_be_made_ready_is_not_used_and_made_again(fake, backend, rig, monkeypatch, step, reason):
    """Without its memory registered every transfer would fail, or go where nobody looks."""
    with monkeypatch.context() as patch:
        patch.setattr(fake, step, lambda *_: -1)
        for _ in range(2):
            with pytest.raises(StorageFailed) as failed:
                rig.put(backend, [0])
            assert failed.value.reason == reason
    assert fake.objects == {}
    assert rig.put(backend, [0]) == rig.get(backend, [0]) == 1


def test_the_batch_under_way_keeps_its_memory_while_the_next_one_is_prepared(fake, rig, backend, monkeypatch):
    """Else what is stored under a key would be another block's."""
    size = backend._object_bytes
    monkeypatch.setattr(backend, "_per_half", 2)
    used: list[set[int]] = []

    def noting(act):
        def call(names, addresses, sizes):
            used.append({byte for begin in addresses for byte in range(begin, begin + size)})
            return act(names, addresses, sizes)

        return call

    for name in ("batch_put_from", "batch_get_into"):
        monkeypatch.setattr(fake, name, noting(getattr(fake, name)))
    assert rig.put(backend, range(7)) == 7
    assert rig.get(backend, range(7)) == 7
    assert len(used) == 8
    for batches in (used[:4], used[4:]):
        for one, following in pairwise(batches):
            assert not one & following


@pytest.mark.parametrize(
    ("url", "words"),
    [("mooncake:", "names no master"), ("mooncake://host?segment=1", "no option segment; options of mooncake: segment_gib")],
)
def test_a_wrong_address_says_what_to_write(url, words):
    with pytest.raises(InvalidConfig) as wrong:
        open_backend(url, layout_of())
    assert words in str(wrong.value)


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", None)
    with pytest.raises(InvalidConfig, match=r"baton-serve\[mooncake\]"):
        open_backend("mooncake://host", layout_of())
