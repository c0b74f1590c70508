"""A decoder step of a small model whose weights transformers has as well; steps are run call by call, on any device."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

import torch

from baton.models.config import Experts, ModelConfig, RopeConfig, Traits
from baton.worker.cuda.step_inputs import (
    NO_PADDING,
    StepBatch,
    decode_views,
    ints_needed,
    mixed_views,
    pack_decode,
    pack_mixed,
)

THEIRS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
NORMED = Traits(qk_norm=True)
TRAITS = {"llama": Traits(), "qwen2": Traits(qkv_bias=True), "qwen3": NORMED, "qwen3_moe": NORMED}
TINY = {"hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "dim": 32, "layers": 2, "vocabulary": 300}
NAMES = {
    "embed": "model.embed_tokens", "attention_norm": "input_layernorm", "attention": "self_attn", "q": "q_proj", "k": "k_proj",
    "v": "v_proj", "o": "o_proj", "mlp_norm": "post_attention_layernorm", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj", "final_norm": "model.norm", "layers": "model.layers",
    "router": "gate",
}  # fmt: skip


def their_name(ours: str) -> str:
    return ".".join(NAMES.get(part, part) for part in ours.split("."))


def their_tensor(state, ours: str) -> torch.Tensor:
    """A newer transformers stacks the experts."""
    name = their_name(ours)
    if name in state:
        return state[name]
    layer, _, rest = name.partition(".experts.")
    expert, part, _ = rest.split(".")
    stacked = state[f"{layer}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(expert)]
    return stacked if part == "down_proj" else stacked.chunk(2)[part == "up_proj"]


def make_models(kind, device, dtype, *, hidden, inner, heads, kv_heads, dim, layers, vocabulary, context=1024, experts=(8, 3)):
    """transformers' model with random weights, our config, and our weights: the same tensors, stacked."""
    import transformers  # seconds, in every process that imports this file

    from baton.worker.cuda.weights import take_weights

    mixture, more = None, {}
    if kind == "qwen3_moe":
        mixture = Experts(count=experts[0], per_token=experts[1], inner_size=inner, normalised=True)
        more = {"num_experts": experts[0], "num_experts_per_tok": experts[1], "moe_intermediate_size": inner}
        more["norm_topk_prob"] = True
    theirs = getattr(transformers, f"{THEIRS[kind]}Config")(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=context, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager", **more,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = getattr(transformers, f"{THEIRS[kind]}ForCausalLM")(theirs).eval()
    torch.set_default_dtype(before)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.normal_(std=0.1 if name.endswith("bias") else 0.2 if "norm" in name else parameter.shape[-1] ** -0.5)
            if "norm" in name:
                parameter.add_(1.0)
    ours = ModelConfig(
        architecture=kind, vocab_size=vocabulary, layers=layers, hidden_size=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=dim, intermediate_size=inner, rope=RopeConfig(theta=10000.0), norm_eps=1e-5, tied_embeddings=False,
        traits=TRAITS[kind], experts=mixture, context_tokens_max=context,
    )  # fmt: skip
    state = model.state_dict()
    return model, ours, take_weights(ours, lambda names: torch.cat([their_tensor(state, name) for name in names]).contiguous())


class StepRig:
    """Sequences by slot; each has a random table in a poisoned pool."""

    def __init__(self, config, weights, *, slots=8, context=256, rows=256, block_size=16, deterministic=False, seed=0, **more):
        """more: of DecoderStep."""
        from baton.worker.cuda.decoder_step import DecoderStep
        from baton.worker.cuda.layer_steps import StepLimits

        embedding = weights.embedding
        self.rng = np.random.default_rng(seed)
        width = context // block_size
        self.pool = torch.full(
            (slots * width, config.layers, 2, config.kv_heads, block_size, config.head_dim),
            float("nan"), dtype=embedding.dtype, device=embedding.device,
        )  # fmt: skip
        limits = StepLimits(rows=rows, sequences=slots, context_tokens=context)
        self.step = DecoderStep(config, weights, self.pool, limits, deterministic=deterministic, **more)
        tables = self.rng.permutation(slots * width).reshape(slots, width).astype(np.int32)
        self.step.tables.copy_(torch.from_numpy(tables))
        self.ints = np.zeros(ints_needed(rows, slots, self.step.rows_per_tile), np.int32)
        self.config = config

    def run(self, work, *, outputs=0, bucket=None, due=None, padding=NO_PADDING, draws=True):
        """work: {slot: (context, token ids)}. Tokens and logits of those that are due, in order."""
        slots = np.array(list(work), np.int32)
        counts = np.array([len(ids) for _, ids in work.values()])
        batch = StepBatch(
            token_ids=np.concatenate([np.asarray(ids, np.int32) for _, ids in work.values()]),
            slots=slots,
            starts=np.concatenate(([0], np.cumsum(counts))),
            contexts=np.array([context for context, _ in work.values()]),
            due=np.ones(len(slots), bool) if due is None else np.asarray(due),
            outputs=np.full(len(slots), outputs, np.int32),
        )
        fixed, kv_heads = self.step.deterministic, self.config.kv_heads
        if batch.decodes and bucket is not None:
            packing, views = pack_decode(batch, bucket, self.ints, kv_heads, fixed=fixed), decode_views
        else:
            views, tile = mixed_views, self.step.rows_per_tile
            packing = pack_mixed(batch, self.ints, kv_heads, tile, fixed=fixed, padding=padding)
        self.step._logits.fill_(float("nan"))
        self.step._tokens.fill_(-9)
        inputs = torch.from_numpy(self.ints.copy()).to(self.pool.device)
        self.step.run(views(packing, inputs), draws=draws)
        count = int(batch.due.sum())
        return self.step.tokens(count).cpu().numpy(), self.step.logits(count).clone()
