"""What the pool of the forward pass in C holds."""

from __future__ import annotations

import dataclasses

import pytest
from rig import TINY, Rig, tiny_model

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.kvpool.layout import INT8_FOURS, KVKind
from baton.native.variants import VARIANTS
from baton.worker.forward.base import torch_kv_kind
from baton.worker.forward.native_forward import kv_kind_for

WIDE = dataclasses.replace(TINY, head_dim=64)


class Machine:
    """All that is asked of a library here."""

    def __init__(self, tiles: bool, variant: str = "amx") -> None:
        self.variant = next(each for each in VARIANTS if each.name == variant)
        self.has_tiles = lambda: int(tiles)


def kind_named(name: str) -> KVKind:
    return INT8_FOURS if name == "int8" else KVKind(*name.split())


@pytest.mark.parametrize(
    ("tiles", "config", "settings", "expected"),
    [
        (True, WIDE, {}, "int8"),
        (True, WIDE, {"quantization": "int4"}, "int8"),
        (False, WIDE, {}, "int8"),
        (True, TINY, {}, "float16"),  # heads of 8
        (True, WIDE, {"block_size": 32}, "float16"),
        (True, WIDE, {"quantization": "none"}, "float32"),
        (True, WIDE, {"kv_dtype": "float16"}, "float16"),
        (True, WIDE, {"kv_dtype": "float32"}, "float32"),
        (False, WIDE, {"quantization": "none", "kv_dtype": "float16"}, "float16"),
        (False, WIDE, {"quantization": "none", "kv_dtype": "int8"}, "int8"),
    ],
)
def test_what_the_pool_holds(tiles, config, settings, expected):
    assert kv_kind_for(Machine(tiles), config, WorkerConfig(**settings)) == kind_named(expected)


@pytest.mark.parametrize(
    ("variant", "expected"), [("dotprod", "int8"), ("i8mm", "int8"), ("avx2", "int8"), ("plain", "float16")]
)
def test_bytes_are_the_default_where_their_products_are_fast(variant, expected):
    assert kv_kind_for(Machine(False, variant), WIDE, WorkerConfig()) == kind_named(expected)
    assert kv_kind_for(Machine(False, variant), WIDE, WorkerConfig(kv_dtype="int8")) == INT8_FOURS


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("compute", ["native", "torch"])
def test_what_only_a_gpu_has_is_refused(kv_dtype, compute):
    settings = WorkerConfig(kv_dtype=kv_dtype)
    with pytest.raises(InvalidConfig, match=f"{kv_dtype} needs a GPU: take float16"):
        kv_kind_for(Machine(True), WIDE, settings) if compute == "native" else torch_kv_kind(settings)


def test_int8_where_it_cannot_be_is_refused():
    with pytest.raises(InvalidConfig, match=r"int8 needs block_size 16 .* here it is 8 and 64: take float16"):
        kv_kind_for(Machine(False), WIDE, WorkerConfig(kv_dtype="int8", block_size=8))


def test_torch_refuses_int8_too():
    with pytest.raises(InvalidConfig, match="int8 needs the native kernels"):
        tiny_model(compute="torch", kv_dtype="int8")


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_every_pool_gives_the_same_answers_in_any_chunks(kv_dtype):
    model = tiny_model(WIDE, compute="native", quantization="int8", kv_dtype=kv_dtype)
    said = []
    for chunk in (None, 1, 5):
        rig = Rig(model, block_size=16, chunk=chunk)
        for i in range(4):
            rig.submit(f"p{i}", [7 * i + j for j in range(1 + 9 * i)], max_tokens=20, logprobs=1)
        rig.run()
        said.append({f"p{i}": rig.words(f"p{i}") for i in range(4)})
        rig.close()
    assert said[0] == said[1] == said[2]
