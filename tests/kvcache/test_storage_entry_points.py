"""Backends of others: the example that finds blocks by token ids, opened by its entry point."""

import sqlite3
from importlib.metadata import EntryPoint

import pytest
from example_package import install_example
from storage_rig import layout_of, soon

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage.foreign import ForeignBackend, foreign_opener
from baton.kvcache.storage.open import GROUP, open_backend
from baton.kvcache.storage.url import parse_url

TOKENS = list(range(100, 120))  # Five blocks of four.


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The address of a store of the example backend."""
    monkeypatch.syspath_prepend(install_example(tmp_path))
    return f"tokens:{tmp_path / 'blocks.db'}"


def put(backend, rig, numbers, tokens):
    return backend.put(rig.keys(numbers), rig.blocks(numbers), soon(), tokens)


def has(backend, rig, numbers, tokens):
    return backend.contains_prefix(rig.keys(numbers), soon(), tokens)


def get(backend, rig, numbers, tokens):
    into = [memoryview(bytearray(rig.layout.block_bytes)) for _ in numbers]
    count = backend.get(rig.keys(numbers), into, soon(), tokens)
    assert into[:count] == rig.blocks(numbers)[:count]
    return count


def test_blocks_are_found_by_their_tokens(installed, rig):
    backend = open_backend(installed, rig.layout)
    assert backend.wants_tokens
    assert put(backend, rig, range(5), TOKENS) == 5
    assert has(backend, rig, range(5), TOKENS) == get(backend, rig, range(5), TOKENS) == 5
    assert has(backend, rig, range(5), [7, *TOKENS[1:]]) == 0, "other tokens"
    assert has(backend, rig, range(5), [*TOKENS[:12], 7, *TOKENS[13:]]) == 3, "a common prefix"


def test_a_run_that_begins_in_the_middle(installed, rig):
    backend = open_backend(installed, rig.layout)
    put(backend, rig, [3, 4], TOKENS)
    assert get(backend, rig, [3, 4], TOKENS) == 2
    assert get(backend, rig, range(5), TOKENS) == 0
    assert get(backend, rig, [3], TOKENS[:16]) == 1


def test_equal_tokens_of_another_tenant_or_layout_are_a_miss(installed, rig):
    backend = open_backend(installed, rig.layout)
    put(backend, rig, range(5), TOKENS)
    assert get(backend, rig, range(10, 15), TOKENS) == 0
    assert has(open_backend(installed, layout_of("another")), rig, range(5), TOKENS) == 0


def test_what_one_server_stored_another_one_finds(installed, rig):
    put(open_backend(installed, rig.layout), rig, range(5), TOKENS)
    assert get(open_backend(installed, rig.layout), rig, range(5), TOKENS) == 5


def test_a_damaged_object_is_a_miss(installed, rig):
    backend = open_backend(installed, rig.layout)
    put(backend, rig, range(5), TOKENS)
    with sqlite3.connect(installed.removeprefix("tokens:")) as connection:
        connection.execute("UPDATE blocks SET object = CAST(substr(object, 1, 900) || x'00' AS BLOB) WHERE rowid = 3")
    assert get(backend, rig, range(5), TOKENS) == 2


def test_its_options_are_its_own(installed, rig):
    backend = open_backend(f"{installed}?blocks_max=3", rig.layout)
    put(backend, rig, range(5), TOKENS)
    assert get(backend, rig, [2, 3, 4], TOKENS) == 3
    assert has(backend, rig, [1], TOKENS[:8]) == 0
    with pytest.raises(InvalidConfig, match="needs a file"):
        open_backend("tokens:", rig.layout)
    with pytest.raises(InvalidConfig, match="options of tokens: blocks_max"):
        open_backend(f"{installed}?quota=1", rig.layout)


def test_a_scheme_that_nobody_brings_names_those_that_are_there(installed, rig):
    with pytest.raises(InvalidConfig, match=r"by entry points of baton.kv_storage: tokens"):
        open_backend("token:x", rig.layout)


class Wild:
    """Does everything that it should not."""

    def __init__(self, act):
        self.contains_prefix = self.get = self.put = lambda *_: act()

    def counters(self):
        raise RuntimeError

    close = counters


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: raises(RuntimeError("prompt text")), "protocol"),
        (lambda: raises(KeyError("k")), "protocol"),
        (lambda: raises(StorageFailed("full", "no room", done=99)), "full"),
        (lambda: 6, "protocol"),
        (lambda: -1, "protocol"),
        (lambda: None, "protocol"),
    ],
)
def test_whatever_a_plug_in_does_is_a_typed_failure(rig, act, reason):
    backend = ForeignBackend("wild:open", Wild(act))
    assert not backend.wants_tokens
    for call in (put, has, get):
        with pytest.raises(StorageFailed) as failed:
            call(backend, rig, range(5), None)
        assert failed.value.reason == reason
        assert failed.value.done == 0
        assert "prompt text" not in str(failed.value)
    assert backend.counters() == {}
    backend.close()


def test_a_plug_in_that_cannot_be_opened_is_a_wrong_setting(rig):
    entry = EntryPoint("wild", "no_such_module:open_it", GROUP)
    with pytest.raises(InvalidConfig, match=r"no_such_module:open_it cannot be opened"):
        foreign_opener(entry)(parse_url("wild:x"), rig.layout)


@pytest.mark.parametrize("scheme", ["file", "redis", "mooncake"])
def test_our_own_backends_get_no_tokens(scheme):
    from baton.kvcache.storage.files import FileBackend
    from baton.kvcache.storage.mooncake_store import MooncakeBackend
    from baton.kvcache.storage.redis_store import RedisBackend

    assert not {"file": FileBackend, "redis": RedisBackend, "mooncake": MooncakeBackend}[scheme].wants_tokens
