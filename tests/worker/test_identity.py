"""The root of block keys is what KV depends on: content, never a path or "auto"."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "chaos"))
from chaos_model import make_model

from baton.config import WorkerConfig
from baton.errors import ModelFileBroken
from baton.kvpool.layout import KVKind
from baton.kvpool.pool import KVPool
from baton.models.open import open_model
from baton.native import build, build_cache
from baton.native.library import Library, load_variant
from baton.native.variants import supported_variants
from baton.worker import weights_digest
from baton.worker.build import build_worker
from baton.worker.forward.native_forward import load_native
from baton.worker.identity import KVIdentity, weight_types
from baton.worker.kv_layout import kv_layout
from baton.worker.weights_digest import CHUNK_BYTES, Digest, DigestInProgress

IDENTITY = KVIdentity(weights=b"w", model="m", weight_types="t", kernels="k", layout=b"l", block_size=16)


@pytest.fixture(autouse=True)
def digests(tmp_path, monkeypatch):
    """Kept in a folder of the test, and even of files as young as the test's."""
    monkeypatch.setattr(weights_digest, "user_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(weights_digest, "RECENT_SECONDS", -1.0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def identity(path: Path, **settings) -> bytes:
    built = build_worker(WorkerConfig(model=str(path), blocks=8, slots=2, **settings))
    built.runner.close()
    return built.identity


def digest(path: Path) -> Digest:
    with DigestInProgress(open_model(path).files, 2) as digesting:
        return digesting.result()


def change_in_place(file: Path, offset: int) -> None:
    """One byte; mtime and size are as before."""
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system ticks every few milliseconds
        with file.open("r+b") as opened:
            opened.seek(offset)
            byte = opened.read(1)
            opened.seek(offset)
            opened.write(bytes([byte[0] ^ 1]))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


# Whole


def test_the_same_file_under_two_paths_has_one_root(model, tmp_path):
    other = tmp_path / "elsewhere" / "of another name"
    shutil.copytree(model, other)
    (tmp_path / "link").symlink_to(model)
    assert identity(model) == identity(other) == identity(tmp_path / "link")


def test_a_changed_file_has_another_root(model, tmp_path):
    assert identity(model) != identity(make_model(tmp_path / "other", seed=8))


def test_a_file_changed_in_place_with_its_mtime_set_back_is_noticed(model):
    first = identity(model)
    assert identity(model) == first
    change_in_place(model / "model.safetensors", -100 + (model / "model.safetensors").stat().st_size)
    assert identity(model) != first


def test_what_the_config_changes_changes_the_root(model):
    first = identity(model)
    config = model / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert identity(model) != first


def test_how_it_is_computed_is_part_of_the_root(model):
    ways = [{}, {"quantization": "none"}, {"quantization": "int4"}, {"kv_dtype": "float32"}, {"block_size": 8}]
    ways.append({"compute": "torch", "kv_dtype": "float32"})
    found = [identity(model, **way) for way in ways]
    assert len({*found}) == len(found)


def test_auto_is_resolved(model):
    """The tiny model has float32 weights: auto computes on 8 bits, as int8 does. How it was asked for does not matter."""
    opened = open_model(model)
    assert weight_types(opened, "auto") == weight_types(opened, "int8") != weight_types(opened, "int4")
    assert identity(model) == identity(model, quantization="int8")
    resolved = {"float32", "float16"}  # auto is one of them, or int8, which this head width does not allow
    assert identity(model, quantization="none") in {identity(model, quantization="none", kv_dtype=each) for each in resolved}


def test_what_does_not_change_kv_does_not_change_the_root(model):
    first = identity(model)
    assert identity(model, threads=1, context_tokens_max=64, generation_config="none") == first


def test_every_variant_of_the_kernels_has_its_own_arithmetic(model):
    variants = [variant for variant in supported_variants() if isinstance(load_variant(variant), Library)]
    config = WorkerConfig(model=str(model), blocks=8, slots=2, kv_dtype="float32", threads=1)
    names = []
    for variant in variants:
        opened = open_model(model)
        pool = KVPool.create(kv_layout(opened.config, 16, KVKind("float32")), 2)
        forward = load_native(load_variant(variant), opened, config).with_pool(pool)
        names.append(forward.arithmetic)
        forward.close()
        pool.close()
    assert len({*names}) == len(variants)


def test_a_comment_in_the_kernels_is_not_part_of_the_root(model, monkeypatch, tmp_path):
    """What counts is bits: a release that computes the same goes on with what the last one has stored."""
    first = identity(model)
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    with (sources / "layers.h").open("a") as file:
        file.write("/* a comment */\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert identity(model) == first


@pytest.mark.parametrize("field", [field.name for field in fields(KVIdentity)])
def test_every_field_changes_the_digest(field):
    value = getattr(IDENTITY, field)
    other = value + b"'" if isinstance(value, bytes) else value + 1 if isinstance(value, int) else f"{value}'"
    assert replace(IDENTITY, **{field: other}).digest() != IDENTITY.digest()


@pytest.mark.parametrize("field", [field.name for field in fields(KVIdentity)])
def test_every_field_changes_its_part_and_no_other(field):
    """The parts are what a refusal names: short, and one for each field."""
    value = getattr(IDENTITY, field)
    other = b"'" + value if isinstance(value, bytes) else value + 1 if isinstance(value, int) else f"'{value}"
    parts, changed = IDENTITY.parts(), replace(IDENTITY, **{field: other}).parts()
    assert [name for name in parts if parts[name] != changed[name]] == [field]
    assert list(parts) == [each.name for each in fields(KVIdentity)]
    assert max(map(len, parts.values())) <= 80


def test_a_long_part_is_its_digest():
    texts = [replace(IDENTITY, model=text * 100).parts()["model"] for text in "ab"]
    assert len({*texts}) == 2
    assert max(map(len, texts)) == 16


def test_neighbouring_fields_do_not_run_into_each_other():
    assert replace(IDENTITY, model="ab", weight_types="c").digest() != replace(IDENTITY, model="a", weight_types="bc").digest()


def test_the_rank_is_not_in_the_chain():
    assert "rank" not in " ".join(field.name for field in fields(KVIdentity))


# The digest of the weights


def test_a_second_start_reads_nothing(model):
    first, second = digest(model), digest(model)
    assert first.read_bytes == (model / "model.safetensors").stat().st_size
    assert (second.value, second.read_bytes) == (first.value, 0)


def test_a_file_that_was_changed_just_now_is_read_again(model, monkeypatch):
    """Within one tick of the clock of the file system it may change once more, and its times would not say so."""
    monkeypatch.setattr(weights_digest, "RECENT_SECONDS", 1000.0)
    assert digest(model).read_bytes
    assert digest(model).read_bytes


def test_a_damaged_or_foreign_entry_is_not_believed(model, digests):
    first = digest(model)
    (entry,) = digests.iterdir()
    for content in ("", "x\ny\n", entry.read_text().splitlines()[0] + "\n00\n", "\xff" * 100):
        entry.write_text(content)
        again = digest(model)
        assert again.value == first.value
        assert again.read_bytes


def test_where_nothing_can_be_kept_every_start_reads(model, monkeypatch, tmp_path):
    def refused(folder):
        raise build_cache.Untrusted("belongs to another user")

    monkeypatch.setattr(weights_digest, "open_folder", refused)
    assert digest(model).value == digest(model).value
    assert digest(model).read_bytes


def test_of_too_many_digests_the_ones_used_longest_ago_go(digests, monkeypatch):
    monkeypatch.setattr(weights_digest, "ENTRIES_MAX", 2)
    digests.mkdir(parents=True)
    for age, name in enumerate("abcd"):
        (digests / name).write_text(name)
        os.utime(digests / name, (1000 - age, 1000 - age))
    weights_digest.DigestStore._tidy(digests)
    assert sorted(path.name for path in digests.iterdir()) == ["a", "b"]


def test_the_folder_is_private(model, digests):
    digest(model)
    assert digests.stat().st_mode & 0o077 == 0


def test_a_file_changed_while_it_is_loaded_ends_the_start(model):
    opened = open_model(model)
    with DigestInProgress(opened.files, 1) as digesting:
        change_in_place(model / "model.safetensors", 5000)
        with pytest.raises(ModelFileBroken, match="changed while it was loaded"):
            digesting.result()


class Second:
    """Rank 1's end of an exchange, in which rank 0 answers these notes; None: the same as rank 1."""

    rank, ranks = 1, 2

    def __init__(self, *of_first: bytes | None) -> None:
        self._of_first = list(of_first)

    def notes(self, note: bytes) -> list[bytes]:
        return [self._of_first.pop(0) or note, note]


OF_FIRST = bytes(32)[:-1] + b"1"


def test_a_rank_with_the_files_of_the_first_takes_its_digest_and_reads_none(model):
    """Every rank read all files at the first start, whatever its part."""
    with DigestInProgress(open_model(model).files, 1, collective=Second(None, OF_FIRST)) as digesting:
        found = digesting.result()
    assert (found.value, found.read_bytes) == (OF_FIRST, 0)


def test_a_rank_with_other_files_has_a_digest_of_its_own(model):
    alone = digest(model).value
    with DigestInProgress(open_model(model).files, 1, collective=Second(bytes(32), OF_FIRST)) as digesting:
        assert digesting.result().value == alone != OF_FIRST, "so the hellos of the two differ"


def test_a_file_changed_while_a_further_rank_loads_it_ends_the_start(model):
    with DigestInProgress(open_model(model).files, 1, collective=Second(None, OF_FIRST)) as digesting:
        change_in_place(model / "model.safetensors", 5000)
        with pytest.raises(ModelFileBroken, match="changed while it was loaded"):
            digesting.result()


def test_a_file_replaced_while_it_is_loaded_is_the_one_that_was_opened(model, tmp_path):
    first = digest(model)
    opened = open_model(model)
    (make_model(tmp_path / "new", seed=9) / "model.safetensors").replace(model / "model.safetensors")
    with DigestInProgress(opened.files, 1) as digesting:
        assert digesting.result().value == first.value
    assert digest(model).value != first.value


def test_the_order_of_chunks_matters(tmp_path, digests):
    """A digest over chunks is one over the file: two chunks that change places give another."""

    class File:
        def __init__(self, content: bytes) -> None:
            self.path, self.buffer = tmp_path / "file", content
            self.path.write_bytes(b"")
            self.stat = self.path.stat()

    def of(content: bytes) -> bytes:
        shutil.rmtree(digests, ignore_errors=True)
        with DigestInProgress([File(content)], 2) as digesting:
            value = digesting.result().value
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-digest")]
        return value

    one, two = bytes(CHUNK_BYTES), b"x" * CHUNK_BYTES
    assert len({of(one + two), of(two + one), of(one + two[:-1]), of(one), of(one + one), of(b"")}) == 6
