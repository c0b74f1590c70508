"""Two instances of `baton up` on one GPU, without a word about memory: they divide it, and prompts are handed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_cluster import Cluster
from chaos_model import make_model
from chaos_server import USUAL

torch = pytest.importorskip("torch")
LARGE = {"num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
"""Little weights and much KV: 128 KiB a token, so that the pool takes all that it may."""


@pytest.mark.timeout(240)
def test_instances_that_share_a_gpu_divide_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Found by a review: each took 90 % of it, and one of them could not start."""
    monkeypatch.delitem(USUAL, "kv_blocks")
    model = make_model(tmp_path / "model", max_position_embeddings=32768, **LARGE)
    settings = {"prefill": 1, "decode": 1, "block_size": 128, "slots": 64}
    with Cluster(model, tmp_path / "cluster", **settings).wait_ready() as cluster:
        free, total = torch.cuda.mem_get_info()
        print(f"in use: {(total - free) / 2**30:.2f} of {total / 2**30:.2f} GiB; {cluster.output}")
        assert 0.8 * total < total - free < 0.92 * total
        body = {"model": "tiny", "prompt": "The quick brown fox " * 20, "max_tokens": 8, "temperature": 0}
        for number in range(3):
            reply = cluster.ask("/v1/completions", {**body, "prompt": f"{number} {body['prompt']}"})
            assert reply.status == 200, reply.content
        handed = sum(count for name, count in cluster.metrics().items() if name.startswith("baton:router_handoffs_total"))
        assert handed > 0, cluster.view()
