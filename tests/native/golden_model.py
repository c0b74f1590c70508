"""A small model that is the same on every machine, and digests of what the kernels make of it.

    python tests/native/golden_model.py                  prints the digests of every variant that this machine runs
    python tests/native/golden_model.py --write          adds those that changed to golden.json, under the next number
    python tests/native/golden_model.py amx avxvnni ...  those of these variants, whatever the processor says it can do

A processor with AVX-512 and VNNI stands in for two others (STAND_INS): their integer instructions have the same results in C
and under another name. An emulator runs those of ARM: qemu-aarch64 -cpu max, with the third form.

Weights and tokens come from integers, so no generator and no math library has a say in them. The cases take every kind of
weights with every kind of keys and values through prompts, chunks, single tokens, several sequences, and contexts that are
longer than a split (csrc/attention_int8_softmax.h). Then NATIVE in worker/arithmetic.py has to say the same number.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from baton.config import WorkerConfig
from baton.kvpool.pool import KVPool
from baton.models.config import Experts, ModelConfig, RopeConfig, Traits, YarnScaling
from baton.models.encoders.config import EncoderConfig
from baton.models.loaders.weights import StoredTensor
from baton.models.open import OpenedModel
from baton.models.parameters import EMBED, LM_HEAD, expected_shapes
from baton.models.raw_tensor import Bytes, RawTensor, scales_shape
from baton.models.tensor_types import (
    BF16,
    F8_E4M3,
    F16,
    F32,
    MXFP4,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TensorType,
)
from baton.native.library import Library, load_variant
from baton.native.variants import VARIANTS, Variant, supported_variants
from baton.worker.arithmetic import native_key
from baton.worker.draws import DRAW
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.native_forward import load_native
from baton.worker.kv_layout import kv_layout

GOLDEN = Path(__file__).with_name("golden.json")
BLOCK = 16
THREADS = 2
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=203,
    layers=2,
    hidden_size=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    rope=RopeConfig(theta=10000.0),
    norm_eps=1e-5,
    tied_embeddings=False,
    traits=Traits(qkv_bias=True, qk_norm=True, layer_windows=(None, 300)),
    context_tokens_max=1100,
)
MIXTURES: dict[str, Experts | None] = {
    "": None,
    "softmax": Experts(count=6, per_token=2, inner_size=256, normalised=True),
    "sigmoid": Experts(
        count=9, per_token=4, inner_size=512, normalised=False, scoring="sigmoid", correction=True, scale=1.5, shared_size=256,
        shared_gate=True, layers=(False, True),
    ),
    "gpt-oss": Experts(count=6, per_token=2, inner_size=256, normalised=True, bias=True),
}  # fmt: skip
OSS_TRAITS = Traits(qkv_bias=True, output_bias=True, sinks=True, activation="swiglu_oai", layer_windows=(60, None))
OSS_ROPE = RopeConfig(theta=150_000.0, scaling=YarnScaling(factor=4.0, original_context=256, truncate=False))
HALVES: dict[TensorType, tuple[int, ...]] = {
    Q4_0: (0,), Q4_1: (0, 2), Q5_0: (0,), Q5_1: (0, 2), Q8_0: (0,), Q4_K: (0, 2), Q5_K: (0, 2), Q6_K: (208,),
}  # fmt: skip
"""Where in a block float16 numbers are: the rest may be any bytes."""
SCALE: dict[TensorType, float] = {
    Q4_0: 2.0**-7, Q4_1: 2.0**-7, Q5_0: 2.0**-8, Q5_1: 2.0**-8, Q8_0: 2.0**-11, Q4_K: 2.0**-13, Q5_K: 2.0**-14, Q6_K: 2.0**-15,
}  # fmt: skip
"""That makes weights about as large as those of a trained model: 1 / 16, as the width is 256."""


@dataclass(frozen=True)
class Case:
    """What the weights are stored as, and how they are computed on."""

    stored: tuple[TensorType, ...]
    "Matrices take them in turns."
    quantization: str
    kv_dtype: str
    long: bool = False
    experts: str = ""
    "One of MIXTURES."
    negative: bool = False
    "Every second block has a negative scale, as about half of those of a Q4_0 file. Only tiles treat them in their own way."

    @property
    def name(self) -> str:
        kinds = self.stored[0].name if len(self.stored) == 1 else "every kind"
        more = f", {self.experts} experts" if self.experts else ""
        return f"{kinds} as {self.quantization}, {self.kv_dtype} keys{', long' * self.long}{', negative' * self.negative}{more}"


EVERY_KIND = (Q8_0, Q4_K, Q6_K, F16, Q5_0, BF16, Q5_1, F32, Q5_K, Q4_1, Q4_0)
CASES = (
    Case((F32,), "none", "float32", long=True),
    Case((F32,), "none", "float16", long=True),
    Case((F32,), "int8", "int8", long=True),
    Case((F32,), "int8", "float32"),
    Case((F32,), "int4", "int8"),
    Case((F32,), "int4", "float16"),
    Case((Q4_0,), "auto", "int8"),
    Case((Q4_0,), "auto", "float32"),
    Case((Q4_0,), "auto", "float32", negative=True),
    Case((Q4_1,), "auto", "float32", negative=True),
    Case((Q4_1,), "auto", "int8"),
    Case((Q4_K,), "auto", "float16"),
    Case((Q8_0,), "auto", "int8"),
    Case(EVERY_KIND, "auto", "int8"),
    Case(EVERY_KIND, "none", "float16"),
    Case((F32,), "none", "float32", experts="softmax"),
    Case((F32,), "none", "float32", experts="sigmoid"),
    Case((F32,), "int8", "int8", experts="sigmoid"),
    Case((F32,), "int4", "int8", experts="sigmoid"),
    Case((Q4_K,), "auto", "int8", experts="softmax"),
    Case((MXFP4,), "auto", "int8", experts="gpt-oss"),
    Case((MXFP4,), "auto", "float32", experts="gpt-oss"),
    Case((MXFP4,), "int8", "int8", experts="gpt-oss"),
    Case((MXFP4,), "none", "float16", experts="gpt-oss"),
)
INSTEAD = Path(__file__).parent
_AVX512, _AVX2 = (next(variant for variant in VARIANTS if variant.name == name) for name in ("avx512", "avx2"))
STAND_INS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512.compiler_flags, "-include", str(INSTEAD / "tiles_in_c.h")),
    "avxvnni": (*_AVX2.compiler_flags, "-mavx512vnni", "-mavx512vl", "-include", str(INSTEAD / "vnni_as_avx512.h")),
}
"""Compiler flags with which a processor that has AVX-512 and VNNI computes what another variant does."""


def words(name: str, count: int) -> np.ndarray:
    """So many 64-bit words: splitmix64 of a counter that begins with the name."""
    x = np.arange(count, dtype=np.uint64) + (np.uint64(zlib.crc32(name.encode())) << np.uint64(32))
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def numbers(name: str, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Like a normal distribution of about 2 ** -bits: the sum of four bytes, so every one is a float32 exactly."""
    each = words(name, prod(shape)).view(np.uint8).reshape(-1, 8)[:, :4].astype(np.int32).sum(1) - 510
    return (each.astype(np.float32) * np.float32(2.0 ** -(7 + bits))).reshape(shape)


class GoldenWeights:
    """models/loaders/weights.py: WeightSource."""

    origin = "golden weights"

    def __init__(self, config: ModelConfig | EncoderConfig, kinds: tuple[TensorType, ...], *, negative: bool = False) -> None:
        self._shapes, self._negative = expected_shapes(config), negative
        matrices = [name for name, shape in self._shapes.items() if len(shape) == 2]
        self._types = {name: kinds[place % len(kinds)] for place, name in enumerate(matrices)}

    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(kind, shape, kind.row_bytes(prod(shape)), name)
            for name, shape in self._shapes.items()
            for kind in (self._types.get(name, F32),)
        }

    def raw(self, name: str) -> RawTensor:
        shape, kind = self._shapes[name], self._types.get(name, F32)
        if name.endswith("norm.weight"):
            return RawTensor.of_floats(numbers(name, shape, 3) + np.float32(1.0))
        if kind in HALVES or kind == MXFP4:
            return RawTensor(kind, shape, self._blocks(name, shape, kind))
        if kind == F8_E4M3:
            return RawTensor(kind, shape, self._fp8(name, shape), self._fp8_scales(name, shape))
        values = numbers(name, shape, 0 if name == EMBED else 2 if name == LM_HEAD else 4)
        if kind == F16:
            return RawTensor(kind, shape, values.astype(np.float16).view(np.uint8))
        if kind == BF16:
            return RawTensor(kind, shape, (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8))
        return RawTensor.of_floats(values)

    @staticmethod
    def _fp8(name: str, shape: tuple[int, ...]) -> Bytes:
        """Numbers from 1 / 4 to 3.75, of both signs."""
        some: Bytes = words(name, -(-prod(shape) // 8)).view(np.uint8)[: prod(shape)].reshape(shape)
        exponents: Bytes = (5 + (some >> 3) % 4).astype(np.uint8)
        return some & np.uint8(0x87) | exponents << np.uint8(3)

    @staticmethod
    def _fp8_scales(name: str, shape: tuple[int, ...]) -> np.ndarray:
        blocks = scales_shape(shape)
        some = words(f"{name} scales", prod(blocks)).reshape(blocks) % np.uint64(4)
        return (some.astype(np.float32) + np.float32(4.0)) * np.float32(2.0**-8)

    def _blocks(self, name: str, shape: tuple[int, ...], kind: TensorType) -> Bytes:
        nbytes = kind.row_bytes(prod(shape))
        blocks = words(name, -(-nbytes // 8)).view(np.uint8)[:nbytes].reshape(-1, kind.block_bytes)
        if kind == MXFP4:
            blocks[:, 0] = 121 + blocks[:, 0] % 4  # 2 ** -6 to 2 ** -3
        for place, at in enumerate(HALVES.get(kind, ())):
            scale = np.full((len(blocks), 1), SCALE[kind] * (-8.0 if place and kind in (Q4_1, Q5_1) else 1.0), np.float16)
            if self._negative:
                scale[::2] *= -1
            blocks[:, at : at + 2] = scale.view(np.uint8)
        return blocks.reshape(shape[0], -1)


Part = tuple[int, int, int]
"""(sequence, tokens before this step, tokens in this step)."""
SHORT: list[list[Part]] = [
    [(0, 0, 70), (1, 0, 5)],
    [(0, 70, 1), (1, 5, 17), (2, 0, 33)],
    [(0, 71, 1), (1, 22, 1), (2, 33, 1)],
    [(2, 34, 1)],
    [(0, 72, 1), (1, 23, 1), (2, 35, 12), (3, 0, 1)],
]
LONG: list[list[Part]] = [[(0, 0, 512)], [(0, 512, 500)], [(0, 1012, 40)], [(0, 1052, 1)], [(0, 1053, 3), (1, 0, 9)]]


def digest_of(library: Library, case: Case) -> str:
    """Of all logits, and of some draws from them."""
    config = replace(CONFIG, experts=MIXTURES[case.experts])
    if case.experts == "gpt-oss":
        config = replace(config, traits=OSS_TRAITS, rope=OSS_ROPE)
    weights = GoldenWeights(config, case.stored, negative=case.negative)
    settings: dict[str, Any] = {"quantization": case.quantization, "kv_dtype": case.kv_dtype, "threads": THREADS}
    loaded = load_native(library, OpenedModel(Path(), config, weights), WorkerConfig(block_size=BLOCK, **settings))
    width = -(-CONFIG.context_tokens_max // BLOCK)
    pool = KVPool.create(kv_layout(CONFIG, BLOCK, loaded.kv), 4 * width)
    tables = np.arange(4 * width, dtype=np.int32)[::-1].reshape(4, width).copy()
    forward = loaded.with_pool(pool)
    digest = sha256()
    for parts in LONG if case.long else SHORT:
        hidden = forward.hidden(batch_of(tables, parts))
        for begin in range(0, len(hidden), 64):
            logits = forward.logits(hidden[begin : begin + 64])
            assert np.isfinite(logits).all(), case.name  # what is no number has many bits that mean the same
            digest.update(logits.tobytes())
            digest.update(forward.choose(logits, _draws(len(logits))).tobytes())
    forward.close()
    pool.close()
    return digest.hexdigest()[:24]


def batch_of(tables: np.ndarray, parts: list[Part]) -> FlatBatch:
    token_ids = np.concatenate([words(f"tokens {s}", at + n)[at:] % np.uint64(CONFIG.vocab_size) for s, at, n in parts])
    positions = np.concatenate([np.arange(at, at + n) for _, at, n in parts])
    starts = np.cumsum([0, *(n for _, _, n in parts)]).astype(np.int64)
    slots, contexts = (np.array([part[which] for part in parts], np.int64) for which in (0, 1))
    return FlatBatch(Spans(tables, slots, starts, contexts), token_ids.astype(np.int32), positions, np.ones(len(parts), bool))


def _draws(rows: int) -> np.ndarray:
    draws = np.zeros(rows, DRAW)
    draws["uniform"] = (np.arange(rows) * 37 % 64 + 0.5) / 64
    draws["temperature"], draws["top_p"] = np.arange(rows) % 3, 0.875
    return draws


def digests_of(library: Library) -> dict[str, str]:
    return {case.name: digest_of(library, case) for case in CASES if library.has_tiles() or not case.negative}


def runnable_variants() -> list[Variant]:
    """Of this machine, and those that it can stand in for."""
    own = supported_variants()
    instead = [replace(each, compiler_flags=STAND_INS[each.name]) for each in VARIANTS if each.name in STAND_INS]
    return [*own, *(each for each in instead if _AVX512 in own and each.name not in {variant.name for variant in own})]


Entry = dict[str, Any]
"""{"arithmetic": number, "digests": {case: digest}}"""


def written() -> dict[str, list[Entry]]:
    """Of each variant every arithmetic that it had, the last one last."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def with_digests(entries: list[Entry], digests: dict[str, str]) -> list[Entry]:
    """The next number, where bits have changed. Cases that are new, or no more, change no bits."""
    if not entries:
        return [{"arithmetic": 1, "digests": digests}]
    last = entries[-1]
    if all(digests[name] == last["digests"][name] for name in digests.keys() & last["digests"].keys()):
        return [*entries[:-1], {**last, "digests": digests}]
    return [*entries, {"arithmetic": last["arithmetic"] + 1, "digests": digests}]


def numbers_without_bits(written: Mapping[str, list[Entry]]) -> list[str]:
    """Numbers that are not the next one, or whose digests are those of the number before: bits stay, the number must not
    change."""
    wrong = []
    for key, entries in written.items():
        for place, entry in enumerate(entries):
            before = entries[place - 1]["digests"] if place else {}
            shared = before.keys() & entry["digests"].keys()
            changed = not place or any(before[case] != entry["digests"][case] for case in shared)
            if not changed or entry["arithmetic"] != place + 1:
                wrong.append(f"{key}: {entry['arithmetic']}")
    return wrong


def main() -> None:
    golden, names = written(), [word for word in sys.argv[1:] if not word.startswith("-")]
    here = {variant.name: variant for variant in (*VARIANTS, *runnable_variants())}
    for variant in [here[name] for name in names] or runnable_variants():
        key = native_key(variant)
        digests = digests_of(load_variant(variant))
        print(json.dumps({key: digests}, indent=2), flush=True)
        golden[key] = with_digests(golden.get(key, []), digests)
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(dict(sorted(golden.items())), indent=2) + "\n")


if __name__ == "__main__":
    main()
