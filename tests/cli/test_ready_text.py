"""What `baton serve` says when it is ready, without a server."""

from __future__ import annotations

import pytest

from baton.cli.local_cluster import ready_text as up_text
from baton.cli.router import ready_text as router_text
from baton.cli.serve import ready_text
from baton.config import ServeConfig, TiersConfig, WorkerConfig
from baton.models.aliases import ALIASES
from baton.models.loaders.weights import StoredTensor
from baton.models.tensor_types import BF16, F8_E4M3, F32, Q4_1, Q4_K, Q6_K
from baton.protocol.control import InstanceReady
from baton.runtime.engine.process import _resolved_tiers
from baton.worker.weights_text import weights_text

ROW = {
    "role": "mixed", "processes": "worker, cache", "pool_created_by": "worker", "pool_attached_by": "transfer",
    "weights": "4-bit weights as in the file",
    "device": "cpu", "dtype": "float32", "kv_blocks_by": "kv_blocks", "kv_cache_dtype": "int8", "kv_pool_gib": 2.0,
}  # fmt: skip


def said(tiers: TiersConfig, **settings: object) -> list[str]:
    plan = {**ROW, **_resolved_tiers(tiers, tiers.machine(2**20), 2**20)}
    ready = InstanceReady(100, 16, 64, 258, 512, 512, plan=plan)
    return ready_text(ServeConfig(model="tiny", served_model_name=["tiny"], **settings), ready, 1.0).splitlines()


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (TiersConfig(kv_host_gib=2.0), "2.0 GiB of host memory (2,048 blocks); written through, preempted KV: host"),
        (
            TiersConfig(kv_host_gib=1.0, kv_storage="redis://user:secret@host:6379/0", kv_write="back", preempted_kv="drop"),
            "1.0 GiB of host memory (1,024 blocks) and redis://***@host:6379/0; written back, preempted KV: drop",
        ),
    ],
)
def test_lower_tiers_are_told_and_no_password_is(tiers: TiersConfig, words: str):
    assert [line.split(maxsplit=1)[1] for line in said(tiers) if line.startswith("  tiers")] == [words]


def test_without_lower_tiers_nothing_is_said_of_them():
    assert not [line for line in said(TiersConfig()) if "tiers" in line]


def test_what_is_served_is_told_in_a_user_s_words():
    """No blocks, no names of processes, no private settings."""
    lines = said(TiersConfig())
    assert lines[1:-2] == [
        "  chat page  http://127.0.0.1:8000/",
        "  API        http://127.0.0.1:8000/v1",
        "  model      4-bit weights as in the file, on the CPU; 512 tokens of context",
        "  memory     8-bit KV cache for 1,600 tokens (2.0 GiB)",
        "  at once    64 requests",
    ]
    assert lines[-2].startswith("  try        curl http://127.0.0.1:8000/v1/chat/completions ")
    assert lines[-1] == "Ctrl-C ends it."


@pytest.mark.parametrize(
    ("facts", "words", "route"),
    [
        ({}, "vectors", "/v1/embeddings"),
        ({"labels": ("LABEL_0",)}, "scores of pairs", "/v1/rerank"),
        ({"labels": ("bad", "good")}, "2 classes", "/classify"),
    ],
)
def test_an_encoder_is_called_what_it_is(facts, words, route):
    """No chat page, no KV cache, and a request that it answers."""
    ready = InstanceReady(100, 16, 64, 258, 513, 513, plan=ROW, generates=False, **facts)
    lines = ready_text(ServeConfig(model="tiny", served_model_name=["tiny"]), ready, 1.0).splitlines()
    assert lines[1:-2] == [
        "  API        http://127.0.0.1:8000/v1",
        f"  model      4-bit weights as in the file, on the CPU; an encoder, for {words}; texts of 512 tokens",
        "  at once    64 requests",
    ]
    assert lines[-2].startswith(f"  try        curl http://127.0.0.1:8000{route} ")


def test_a_small_pool_has_its_size_in_mib():
    ready = InstanceReady(100, 16, 64, 258, 512, 512, plan={**ROW, "kv_pool_gib": 0.05})
    text = ready_text(ServeConfig(model="tiny", served_model_name=["tiny"]), ready, 1.0)
    assert "8-bit KV cache for 1,600 tokens (51 MiB)" in text


def test_details_for_authors_are_told_to_who_asks_for_debug_lines():
    assert not [line for line in said(TiersConfig()) if "worker, cache" in line]
    assert [
        line for line in said(TiersConfig(), log_level="debug") if line.startswith("  plan       worker, cache; KV pool of")
    ]


def test_the_built_in_model_is_called_what_it_is(tmp_path):
    small = ALIASES["smollm2"]
    file = tmp_path / small.file
    with file.open("wb") as empty:
        empty.truncate(small.nbytes)
    ready = InstanceReady(100, 16, 64, 258, 512, 512, plan=ROW)
    config = ServeConfig(model=str(file), served_model_name=["smollm2"])
    advice = "smollm2 is a tiny model, to try the server; `baton serve Qwen/Qwen2.5-0.5B-Instruct` answers better"
    assert ready_text(config, ready, 1.0).splitlines()[-2] == advice
    assert up_text(config, {"mixed-0": config.engine()}, ready, 1.0).splitlines()[-2] == advice


def test_a_cluster_is_told_in_the_same_words():
    config = ServeConfig(model="tiny", served_model_name=["tiny"], threads=1)
    ready = InstanceReady(100, 16, 64, 258, 512, 512, plan=ROW)
    lines = up_text(config, {name: config.engine() for name in ("prefill-0", "decode-0")}, ready, 1.0).splitlines()
    assert lines[0].endswith("serves tiny with 2 instances, ready in 1.0 s")
    for line in (
        "  cluster    http://127.0.0.1:8000/v1/cluster",
        "  instances  prefill-0, decode-0",
        "  model      4-bit weights as in the file, on the CPU; 512 tokens of context",
        "  memory     8-bit KV cache for 1,600 tokens (2.0 GiB), each instance",
        "  at once    64 requests, each instance",
    ):
        assert line in lines
    routed = router_text(config, "tcp://127.0.0.1:8100", ready).splitlines()
    assert "  cluster    http://127.0.0.1:8000/v1/cluster; instances join at tcp://127.0.0.1:8100" in routed
    assert "  memory     8-bit KV cache for 1,600 tokens (2.0 GiB), each instance" in routed


@pytest.mark.parametrize(
    ("stored", "settings", "words"),
    [
        (Q4_1, {}, "4-bit weights as in the file"),
        (Q4_K, {}, "4-bit weights as in the file"),
        (Q4_1, {"quantization": "int8"}, "8-bit weights (4-bit in the file)"),
        (Q6_K, {}, "8-bit weights (6-bit in the file)"),
        (BF16, {}, "8-bit weights (bfloat16 in the file)"),
        (BF16, {"quantization": "none"}, "float32 weights (bfloat16 in the file)"),
        (BF16, {"device": "cuda", "dtype": "bfloat16", "quantization": "none"}, "bfloat16 weights as in the file"),
        (F8_E4M3, {"device": "cuda", "dtype": "bfloat16", "quantization": "none"}, "fp8 weights as in the file"),
        (BF16, {"load_format": "dummy"}, "random 8-bit weights"),
    ],
)
def test_weights_are_told_as_they_are_computed(stored, settings, words):
    tensors = {
        "layers.0.mlp.up.weight": StoredTensor(stored, (512, 256), 0, ""),
        "final_norm.weight": StoredTensor(F32, (256,), 0, ""),
    }
    assert (
        weights_text(
            tensors,
            WorkerConfig(**{"device": "cpu", "dtype": "float32", **settings}),
        )
        == words
    )


@pytest.mark.parametrize("there", [True, False])
def test_the_chat_page_is_named_if_there_is_one(there: bool):
    assert any("chat page" in line for line in said(TiersConfig(), chat_page=there)) is there


@pytest.mark.parametrize(("knob", "words"), [("kv_blocks", "beside --kv-blocks"), ("kv_memory_gib", "of its own")])
def test_a_draft_model_has_memory_of_its_own(knob: str, words: str):
    plan = ROW | {"draft_model": "/models/small.gguf", "draft_kv_pool_gib": 0.25, "kv_blocks_by": knob}
    lines = ready_text(
        ServeConfig(model="tiny", served_model_name=("tiny",)), InstanceReady(100, 16, 64, 258, 512, 512, plan=plan), 1.0
    ).splitlines()
    assert f"  drafts     small.gguf, with 0.2 GiB of KV cache {words}" in lines
