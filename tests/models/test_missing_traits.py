"""The error for an architecture that does not run names what it lacks, and transformers' code has just that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf_files import gguf
from tiny_models import transformers

from baton.errors import ModelUnsupported
from baton.models import missing_traits as traits
from baton.models.missing_traits import MISSING_BY_GGUF_NAME, MISSING_BY_HF_STEM
from baton.models.registry import architecture_of_gguf, architecture_of_hf
from baton.models.support import refuse_unsupported_config, supported_architecture

ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
EVIDENCE = {
    traits.SOFT_CAPS: r"softcap",
    traits.LATENT: r"kv_lora_rank",
    traits.CHOSEN_KEYS: r"[Ii]ndexer",
    traits.STATE_SPACE: r"ssm_state|A_log",
    traits.DELTA_RULE: r"delta_rule|kimi_delta|kda",
    traits.LIGHTNING: r"slope_rate",
    traits.CONVOLUTIONS: r"ShortConv",
    traits.RECURRENT: r"[Rr]ecurrent|time_decay|xLSTMBlock",
    traits.CHUNKS: r"attention_chunk_size|chunked_attention",
    traits.SCALED_QUERIES: r"llama_4_attn_scale|attn_temperature_tuning",
    traits.CROSS_ATTENTION: r"encoder_hidden_states|cross_attention",
    traits.LEARNED_POSITIONS: r"wpe|embed_positions",
    traits.ALIBI: r"alibi",
    traits.INPUTS_OF_LAYERS: r"per_layer_input",
    traits.NO_NORM_WEIGHTS: r"no learnable weight|RMSNorm\(eps=",
    traits.CLIPPED: r"clip_qkv",
    traits.DIFFERENTIAL: r"lambda_q1",
    traits.INNER_NORMS: r"ffn_sub_norm",
    traits.LATE_QK_NORM: r"apply_rotary_pos_emb\(query_states, key_states, cos, sin\)\n\s+query_states = self.query_layernorm",
    traits.SPARSE_MIXER: r"sparsemixer",
    traits.HEAD_EXPERTS: r"MoA",
    traits.VALUE_WIDTH: r"v_head_dim",
}
"""By trait: what the code of a model has that needs it."""
GATES = r"gate_proj|gate_up_proj|\.w1\b|fc_gate|\.wi_0"


def source_of(stem: str) -> str:
    names = [stem + ending for ending in ENDINGS if hasattr(transformers, stem + ending)]
    assert names, f"transformers has no model {stem}"
    module = __import__(getattr(transformers, names[0]).__module__, fromlist=["x"])
    return Path(module.__file__).read_text()


@pytest.mark.parametrize("stem", MISSING_BY_HF_STEM)
def test_transformers_code_has_what_is_said_to_be_missing(stem):
    source = source_of(stem)
    for trait in MISSING_BY_HF_STEM[stem]:
        if trait == traits.NO_GATE:
            assert not re.search(GATES, source), f"{stem} has a gate"
        else:
            assert re.search(EVIDENCE[trait], source), f"{stem} does not have {trait}"


@pytest.mark.parametrize("stem", MISSING_BY_HF_STEM)
def test_the_error_names_it(stem):
    for name in (stem + ending for ending in ENDINGS if hasattr(transformers, stem + ending)):
        with pytest.raises(ModelUnsupported) as raised:
            architecture_of_hf([name], "config.json")
        said = str(raised.value)
        assert f"config.json: architecture {name} is not supported (Baton lacks {MISSING_BY_HF_STEM[stem][0]}" in said
        assert "; supported are LlamaForCausalLM" in said


@pytest.mark.parametrize("name", MISSING_BY_GGUF_NAME)
def test_so_does_the_error_for_a_gguf_file(name):
    assert name in gguf.MODEL_ARCH_NAMES.values()
    with pytest.raises(ModelUnsupported, match=re.escape(f"not supported (Baton lacks {MISSING_BY_GGUF_NAME[name][0]}")):
        architecture_of_gguf(name, "m.gguf")


def test_of_several_traits_all_are_named():
    with pytest.raises(ModelUnsupported, match=r"lacks attention in chunks and queries scaled by their position\); supported"):
        architecture_of_hf(["Llama4ForConditionalGeneration"], "config.json")


def test_an_unknown_architecture_has_no_reason():
    with pytest.raises(ModelUnsupported, match=r"architecture NoSuchForCausalLM is not supported; supported are Llama"):
        architecture_of_hf(["NoSuchForCausalLM"], "config.json")


def test_the_text_part_of_ministral_3():
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}}
    with pytest.raises(ModelUnsupported, match=r"ministral3 is not supported \(Baton lacks queries scaled by their position\)"):
        refuse_unsupported_config(raw, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba", "attention"]}, "state-space layers are not supported"),
        ({"layer_types": None}, "state-space layers are not supported"),
        ({"num_local_experts": 72}, "72 experts are not supported for granite_hybrid"),
    ],
)
def test_hybrids_of_granite_4(changes, message):
    from published_configs import published

    from baton.models.config_from_hf import config_from_hf

    raw = published("Granite 4.0 micro")
    assert supported_architecture(raw, "config.json").name == "granite_hybrid"
    with pytest.raises(ModelUnsupported, match=message):
        config_from_hf({**raw, **changes})
