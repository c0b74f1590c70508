"""Files that were made to harm: whatever a header says, the answer is a model or an error of ours, soon and in little memory.

GGUF files are written here byte by byte, so that every count, length, type and offset can lie.
"""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import ModelFileBroken, ModelLoadError
from baton.models.loaders.safetensors_file import SafetensorsFile
from baton.models.loaders.weights import RawWeights
from baton.models.open import open_model

HIDDEN, INNER, VOCAB, LAYERS = 8, 12, 10, 1
MEMORY_MAX = 64 * 2**20
"""Bytes that a refusal may take: the file has a few kilobytes."""


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


NUMBERS = {
    "context_length": 64, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER,
    "attention.head_count": 2, "attention.head_count_kv": 1,
}  # fmt: skip
PAIRS = {
    "general.architecture": pair("general.architecture", 8, string("llama")),
    **{name: pair(f"llama.{name}", 4, u32(value)) for name, value in NUMBERS.items()},
    **{
        name: pair(f"llama.{name}", 6, struct.pack("<f", value))
        for name, value in {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}.items()
    },
}
TENSORS = {
    "token_embd.weight": (HIDDEN, VOCAB),
    "output.weight": (HIDDEN, VOCAB),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN, 4),
    "blk.0.attn_v.weight": (HIDDEN, 4),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (HIDDEN, INNER),
    "blk.0.ffn_up.weight": (HIDDEN, INNER),
    "blk.0.ffn_down.weight": (INNER, HIDDEN),
}
"""Fastest dimension first, as the file has them."""


def entries() -> dict[str, bytes]:
    found, offset = {}, 0
    for name, shape in TENSORS.items():
        found[name] = entry(name, shape, offset)
        offset += -(-4 * int(np.prod(shape)) // 32) * 32
    return found


def entry(name: str | bytes, shape: tuple[int, ...], offset: int, kind: int = 0, dimensions: int | None = None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return string(name) + u32(count) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)


def gguf(pairs: list[bytes], infos: list[bytes], *, counts: tuple[int, int] | None = None, version: int = 3) -> bytes:
    tensors, keys = counts or (len(infos), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(infos)
    data = np.random.default_rng(1).standard_normal(2048).astype("<f4").tobytes()
    return head + bytes(-len(head) % 32) + data


def load(path) -> None:
    opened = open_model(path)
    weights = RawWeights(opened.weights, opened.config)
    for name in list(weights.stored):
        if name in weights._left:
            weights.take(name)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


def refused_or_loaded(path, content: bytes) -> bool:
    """Whether it was refused. Everything else than a model or an error of ours raises here."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        load(path)
    except ModelLoadError:
        return True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_MAX
    return False


def test_the_file_is_a_model_where_nothing_lies(path):
    assert not refused_or_loaded(path, gguf([*PAIRS.values()], [*entries().values()]))


HUGE = st.sampled_from([0, 1, 2, 3, 7, 8, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
ODD = st.sampled_from([0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf")])
WORDS = st.sampled_from([0, 1, 2, 3, 8, 9, 10, 12, 13, 31, 255, 2**16, 2**31, 2**32 - 1])
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@st.composite
def values(draw):
    """A type number and bytes of it, or bytes that are not of it."""
    kind = draw(st.sampled_from([*SCALARS, 8, 9, 13, 2**32 - 1]))
    if kind == 8:
        text = draw(st.sampled_from([b"", b"llama", b"qwen3moe", b"\xff\xfe", b"x" * 300]))
        return kind, string(text, draw(st.none() | HUGE))
    if kind == 9:
        return kind, u32(draw(WORDS)) + struct.pack("<Q", draw(HUGE)) + draw(st.binary(max_size=24))
    if kind not in SCALARS:
        return kind, draw(st.binary(max_size=16))
    code = SCALARS[kind]
    if code[1] in "fd":
        return kind, struct.pack(code, draw(ODD))
    return kind, draw(HUGE).to_bytes(8, "little")[: struct.calcsize(code)]


KEYS = (
    *PAIRS, "expert_count", "expert_used_count", "rope.scaling.type", "rope.scaling.factor", "rope.dimension_count",
    "attention.key_length", "attention.value_length", "attention.sliding_window", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "expert_feed_forward_length",
)  # fmt: skip


@st.composite
def hostile(draw) -> bytes:
    pairs, infos = dict(PAIRS), entries()
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.sampled_from(["pair", "alignment", "split", "entry", "double pair", "double entry", "drop", "tokens"])):
            case "pair":
                key = draw(st.sampled_from(KEYS))
                pairs[key] = pair(key if key.startswith("general") else f"llama.{key}", *draw(values()))
            case "alignment":
                pairs["alignment"] = pair("general.alignment", *draw(values()))
            case "split":
                pairs["split"] = pair("split.count", *draw(values()))
            case "tokens":
                key = draw(
                    st.sampled_from(["tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.tokens"])
                )
                pairs[key] = pair(key, *draw(values()))
            case "entry":
                name = draw(st.sampled_from([*TENSORS, "rope_freqs.weight", "blk.99999999999.attn_q.weight"]))
                shape = tuple(draw(st.lists(HUGE | st.sampled_from([4, HIDDEN, INNER, VOCAB]), max_size=5)))
                infos[name] = entry(name, shape, draw(HUGE), *draw(st.just(()) | st.tuples(WORDS, st.none() | WORDS)))
            case "double pair":
                pairs["double"] = pairs[draw(st.sampled_from(sorted(PAIRS)))]
            case "double entry":
                infos["double"] = entries()[draw(st.sampled_from(sorted(TENSORS)))]
            case "drop":
                infos.pop(draw(st.sampled_from(sorted(TENSORS))), None)
    # One lie at a time about the whole: a file that is refused for its version says nothing about its tensors.
    match draw(st.sampled_from(["counts", "version", "length", *[""] * 9])):
        case "counts":
            return gguf([*pairs.values()], [*infos.values()], counts=draw(st.tuples(HUGE, HUGE)))
        case "version":
            return gguf([*pairs.values()], [*infos.values()], version=draw(WORDS))
        case "length":
            content = gguf([*pairs.values()], [*infos.values()])
            return content[: draw(st.integers(0, len(content)))]
    return gguf([*pairs.values()], [*infos.values()])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=hostile())
def test_any_header_is_refused_or_harmless(path, content):
    refused_or_loaded(path, content)


@pytest.mark.slow
@settings(max_examples=20_000, suppress_health_check=list(HealthCheck))
@given(content=hostile())
def test_any_header_is_refused_or_harmless_many_times(path, content):
    refused_or_loaded(path, content)


# Single lies, by name


def refusal(path, pairs=None, infos=None) -> str:
    content = gguf([*(PAIRS | (pairs or {})).values()], [*(entries() | (infos or {})).values()])
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as refused:
        load(path)
    return str(refused.value)


def test_an_embedding_without_dimensions(path):
    assert "token_embd.weight" in refusal(path, infos={"token_embd.weight": entry("token_embd.weight", (), 0)})


def test_a_key_that_is_there_twice(path):
    again = pair("llama.embedding_length", 4, u32(HIDDEN))
    assert "llama.embedding_length is there twice" in refusal(path, {"again": again})


def test_a_tensor_that_is_there_twice(path):
    assert "output_norm.weight is there twice" in refusal(path, infos={"again": entry("output_norm.weight", (HIDDEN,), 0)})


def test_two_tensors_in_the_same_bytes(path):
    message = refusal(path, infos={"output.weight": entry("output.weight", (HIDDEN, VOCAB), 32)})
    assert "overlap" in message
    assert "output.weight" in message


def test_a_transposed_tensor(path):
    at = entries()["blk.0.ffn_up.weight"][-8:]
    flipped = entry("blk.0.ffn_up.weight", (INNER, HIDDEN), *struct.unpack("<Q", at))
    assert "the shape is [8, 12], but the config asks for [12, 8]" in refusal(path, infos={"blk.0.ffn_up.weight": flipped})


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), -1.0, 0.0])
def test_a_rotary_factor_that_is_no_factor(path, factor):
    scaling = {
        "kind": pair("llama.rope.scaling.type", 8, string("yarn")),
        "factor": pair("llama.rope.scaling.factor", 6, struct.pack("<f", factor)),
    }
    assert "factor" in refusal(path, scaling)


def test_layers_times_experts_are_bounded(path):
    """Names are made for every expert of every layer before a tensor could contradict the numbers."""
    pairs = {
        "general.architecture": pair("general.architecture", 8, string("qwen3moe")),
        **{name: pair(f"qwen3moe.{name}", 4, u32(value)) for name, value in NUMBERS.items()},
        "block_count": pair("qwen3moe.block_count", 4, u32(10_000)),
        "eps": pair("qwen3moe.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        **{
            name: pair(f"qwen3moe.{name}", 4, u32(value))
            for name, value in {"expert_count": 4096, "expert_used_count": 2, "expert_feed_forward_length": 4}.items()
        },
    }
    tracemalloc.start()
    assert "experts" in refusal(path, pairs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY_MAX


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_a_config_that_no_reader_can_take(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileBroken, match=r"config\.json: not readable as JSON"):
        open_model(tmp_path)


def test_a_table_that_names_a_tensor_twice(tmp_path):
    table = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(table)) + table + bytes(4))
    with pytest.raises(ModelFileBroken, match="not a whole safetensors file"):
        SafetensorsFile(tmp_path / "m.safetensors")
