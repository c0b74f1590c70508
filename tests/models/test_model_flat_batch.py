"""One flat batch of many sequences gives each of them what it would get alone."""

from __future__ import annotations

import torch

from baton.models.config import ModelConfig, RopeConfig, Traits
from dense_oracle import DenseAttention, DenseCache, all_logits, dummy_model

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    layers=2,
    hidden_size=24,
    heads=6,
    kv_heads=2,
    head_dim=10,
    intermediate_size=36,
    rope=RopeConfig(theta=10000.0),
    norm_eps=1e-6,
    tied_embeddings=False,
    traits=Traits(qkv_bias=True, qk_norm=True, layer_windows=(None, 4)),
    context_tokens_max=64,
)


def test_chunks_and_neighbours_do_not_change_a_sequence():
    model = dummy_model(CONFIG, seed=3)
    sequences = [[7, 8, 9, 10, 11, 12, 13], [1], [60, 0, 60, 0, 60], list(range(20))]
    alone = [all_logits(model, tokens) for tokens in sequences]
    # How many tokens of each sequence run in each step; a zero sits the step out.
    steps = [(3, 1, 0, 1), (0, 0, 5, 7), (1, 0, 0, 0), (3, 0, 0, 12)]
    caches = [DenseCache(CONFIG) for _ in sequences]
    done = [0] * len(sequences)
    together: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in steps:
        running = [(i, count) for i, count in enumerate(counts) if count]
        tokens = [token for i, count in running for token in sequences[i][done[i] : done[i] + count]]
        positions = [position for i, count in running for position in range(done[i], done[i] + count)]
        attention = DenseAttention(CONFIG, [(caches[i], count) for i, count in running])
        logits = model.logits(model.forward(torch.tensor(tokens), torch.tensor(positions), attention))
        for (i, count), rows in zip(running, logits.split([count for _, count in running]), strict=True):
            together[i].append(rows)
            done[i] += count
    assert done == [len(tokens) for tokens in sequences]
    for expected, parts in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)


def test_the_head_runs_for_the_rows_it_is_given():
    model = dummy_model(CONFIG)
    cache = DenseCache(CONFIG)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    hidden = model.forward(tokens, torch.arange(5), DenseAttention(CONFIG, [(cache, 5)]))
    assert hidden.shape == (5, CONFIG.hidden_size)
    assert model.logits(hidden[[1, 4]]).shape == (2, CONFIG.vocab_size)
    torch.testing.assert_close(model.logits(hidden[[1, 4]]), model.logits(hidden)[[1, 4]], atol=1e-5, rtol=0)


def test_attention_is_asked_once_a_layer_with_the_documented_shapes():
    model = dummy_model(CONFIG)
    calls = []

    def attention(layer, q, k, v, sinks):
        assert sinks is None
        calls.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return torch.zeros(q.shape[0], CONFIG.q_size)

    model.forward(torch.tensor([1, 2, 3]), torch.arange(3), attention)
    assert calls == [(layer, (3, 6, 10), (3, 2, 10), (3, 2, 10)) for layer in range(2)]


def test_forward_leaves_the_weights_alone():
    model = dummy_model(CONFIG)
    before = model.embedding.clone()
    first = all_logits(model, [1, 2, 3])
    assert torch.equal(all_logits(model, [1, 2, 3]), first)
    assert torch.equal(model.embedding, before)


def test_dummy_weights_depend_on_the_seed_alone():
    same = [all_logits(dummy_model(CONFIG, seed=5), [1, 2, 3]) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], all_logits(dummy_model(CONFIG, seed=6), [1, 2, 3]))
    assert same[0].isfinite().all()
