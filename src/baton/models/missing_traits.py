"""Traits that well-known architectures need and that models/config.py does not have. Errors name them.

Of architectures that are in no row, nothing is known here; their traits may even exist, without a file in families/.
tests/models/test_missing_traits.py compares the rows with transformers' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SOFT_CAPS = "soft caps (tanh) on scores or logits"
LATENT = "multi-head latent attention"
CHOSEN_KEYS = "attention to keys that an indexer chooses"
STATE_SPACE = "state-space layers"
DELTA_RULE = "linear attention (delta rule)"
LIGHTNING = "linear attention (lightning)"
CONVOLUTIONS = "convolutions in place of attention"
RECURRENT = "recurrent layers"
CHUNKS = "attention in chunks"
SCALED_QUERIES = "queries scaled by their position"
CROSS_ATTENTION = "cross-attention to an encoder"
LEARNED_POSITIONS = "learned positions"
ALIBI = "ALiBi positions"
NO_GATE = "an MLP without a gate"
INPUTS_OF_LAYERS = "embeddings for every layer"
NO_NORM_WEIGHTS = "norms without weights"
CLIPPED = "limits of queries, keys and values (clip_qkv)"
DIFFERENTIAL = "differential attention"
INNER_NORMS = "norms inside of attention and MLP"
LATE_QK_NORM = "query and key norms after the rotation"
SPARSE_MIXER = "sparse-mixer routing of experts"
HEAD_EXPERTS = "experts of attention heads"
VALUE_WIDTH = "value heads of another width than key heads"

_HF: dict[str, str] = {
    SOFT_CAPS: "Gemma2 VaultGemma Gemma3n Gemma4 NanoChat",
    LATENT: "DeepseekV2 DeepseekV3 DeepseekV32 MiniCPM3 Glm4MoeLite GlmMoeDsa LongcatFlash KimiLinear Mistral4 Youtu",
    CHOSEN_KEYS: "DeepseekV32 GlmMoeDsa",
    STATE_SPACE: "Mamba Mamba2 FalconMamba Jamba FalconH1 Bamba Zamba Zamba2 NemotronH",
    DELTA_RULE: "Qwen3Next Qwen3_5 Qwen3_5Moe OlmoHybrid KimiLinear",
    LIGHTNING: "MiniMax",
    CONVOLUTIONS: "Lfm2 Lfm2Moe",
    RECURRENT: "RecurrentGemma Rwkv xLSTM",
    CHUNKS: "Llama4",
    SCALED_QUERIES: "Llama4 Ministral3 Mistral4",
    CROSS_ATTENTION: "T5 MT5 UMT5 Bart MBart Pegasus M2M100 T5Gemma Whisper Mllama",
    LEARNED_POSITIONS: "GPT2 OPT GPTNeo GPTBigCode",
    ALIBI: "Bloom Mpt",
    NO_GATE: (
        "GPT2 OPT GPTNeo GPTBigCode Bloom Mpt GPTJ GPTNeoX CodeGen Falcon Starcoder2 Phi Nemotron Arcee Persimmon Apertus "
        "Jais2 NanoChat"
    ),
    INPUTS_OF_LAYERS: "Gemma3n",
    NO_NORM_WEIGHTS: "Olmo NanoChat",
    CLIPPED: "Dbrx",
    DIFFERENTIAL: "DiffLlama",
    INNER_NORMS: "BitNet",
    LATE_QK_NORM: "HunYuanDenseV1 HunYuanMoEV1",
    SPARSE_MIXER: "Phimoe",
    HEAD_EXPERTS: "JetMoe",
    VALUE_WIDTH: "MiMoV2Flash",
}
"""By trait: names of `architectures` in a config.json, without their ending."""
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_GGUF: dict[str, str] = {
    SOFT_CAPS: "gemma2 gemma3n gemma4 grok",
    LATENT: "deepseek2 minicpm3 glm-dsa kimi-linear mistral4 plm",
    CHOSEN_KEYS: "glm-dsa",
    STATE_SPACE: "mamba mamba2 jamba falcon-h1 nemotron_h nemotron_h_moe granitehybrid plamo2",
    DELTA_RULE: "qwen3next qwen35 qwen35moe kimi-linear",
    CONVOLUTIONS: "lfm2 lfm2moe",
    RECURRENT: "rwkv6 rwkv7 rwkv6qwen2 arwkv7",
    CHUNKS: "llama4",
    SCALED_QUERIES: "llama4 mistral4",
    CROSS_ATTENTION: "t5",
    LEARNED_POSITIONS: "gpt2 starcoder",
    ALIBI: "bloom mpt refact jais",
    NO_GATE: "gpt2 starcoder bloom mpt gptj gptneox falcon starcoder2 phi2 nemotron arcee apertus codeshell jais2",
    INPUTS_OF_LAYERS: "gemma3n",
    NO_NORM_WEIGHTS: "olmo",
    CLIPPED: "dbrx",
    INNER_NORMS: "bitnet",
    LATE_QK_NORM: "hunyuan-dense hunyuan-moe",
    SPARSE_MIXER: "phimoe",
    VALUE_WIDTH: "mimo2",
}
"""By trait: names of `general.architecture` in a GGUF file."""


def _by_name(table: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    names = dict.fromkeys(name for row in table.values() for name in row.split())
    return MappingProxyType({name: tuple(trait for trait, row in table.items() if name in row.split()) for name in names})


MISSING_BY_HF_STEM, MISSING_BY_GGUF_NAME = _by_name(_HF), _by_name(_GGUF)
_BY_LOWER_STEM = {name.lower(): traits for name, traits in MISSING_BY_HF_STEM.items()}


def missing_traits(names: str) -> str:
    """Traits that these architectures need and that do not exist, in words. Empty: nothing is known. `names`: from a
    config.json, with commas between them, or from a GGUF file. `model_type`s are names, too."""
    found = [trait for name in names.split(", ") for trait in _of(name)]
    return " and ".join(dict.fromkeys(found))


def _of(name: str) -> tuple[str, ...]:
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return MISSING_BY_GGUF_NAME.get(name) or _BY_LOWER_STEM.get(name.lower(), ())
