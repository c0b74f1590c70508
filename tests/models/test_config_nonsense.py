"""Any nonsense in any setting of any family is a model, or an error of ours that names its place: never a stray exception.

Only the config is read here, so every setting of every family is affordable; test_model_broken_files.py also computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gguf_files import write_gguf
from published_configs import PUBLISHED, SIZES, published
from tiny_models import oracle_model

from baton.errors import ModelLoadError
from baton.models.config_from_gguf import config_from_gguf
from baton.models.config_from_hf import config_from_hf
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.registry import ARCHITECTURES

NONSENSE = [
    *(None, 0, -1, 1, 3, 2**40, 10**400, -(10**400), 1.5, -0.5, 1e-200, 1e200, 1e308, float("nan"), float("inf")),
    *("x", "", True, False, [], [1], ["a"], [None], [[1]], {}, {"a": 1}, {"factor": [1]}),
]
AT_A_TIME = 3
"""Values per setting in the cheap test; the slow one takes all."""
SETTINGS = {
    *SIZES,
    *(key for _, settings in PUBLISHED.values() for key in settings),
    *("architectures", "rms_norm_eps", "rope_parameters", "no_rope_layer_interval", "tie_word_embeddings", "hidden_act"),
    *("quantization_config", "swiglu_alpha", "layer_norm_eps", "moe_layer_interval", "n_group", "use_qk_norm", "mlp_bias"),
}
ROTARY = (
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "attention_factor", "low_freq_factor", "short_factor", "partial_rotary_factor", "truncate"),
)


def lies(model: str, rotary: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    good = published(model)
    for key in sorted(SETTINGS):
        for value in NONSENSE:
            yield key, value, {**good, key: value}
    for key in ROTARY:
        for value in NONSENSE:
            yield f"rope {key}", value, {**good, "rope_scaling": {**rotary, key: value}}


def refusal(read: Callable[[], object]) -> str:
    """Empty: it was read. Everything else than a model or an error of ours raises here."""
    try:
        read()
    except ModelLoadError as error:
        return str(error)
    return ""


def refused_or_read(config: dict[str, Any]) -> None:
    assert names_its_place(refusal(lambda: config_from_hf(config, "config.json")), "config.json")


def names_its_place(words: str, place: str) -> bool:
    return not words or words.startswith((place, "model config: "))


def table_of(model: str) -> dict[str, Any]:
    return PUBLISHED[model][1].get("rope_scaling") or {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(("number", "model"), list(enumerate(PUBLISHED)), ids=list(PUBLISHED))
def test_some_nonsense_in_every_setting(number, model):
    """Which values a setting gets differs between the models."""
    step = len(NONSENSE) // AT_A_TIME
    for index, (_, _, config) in enumerate(lies(model, table_of(model))):
        if (index + index // len(NONSENSE) + number) % step == 0:
            refused_or_read(config)


@pytest.mark.slow
@pytest.mark.parametrize("model", PUBLISHED)
def test_all_nonsense_in_every_setting(model):
    for _, _, config in lies(model, table_of(model)):
        refused_or_read(config)


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("Qwen3-MoE", {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list of whole numbers"),
        ("Granite 3.3", {"residual_multiplier": 1e-200}, "residual_multiplier is 1e-200; it must be positive"),
        ("Llama 2", {"rms_norm_eps": 10**400}, "rms_norm_eps has 401 digits"),
        ("Llama 2", {"partial_rotary_factor": 1e20}, "rotary positions on 2147483648 dimensions"),
    ],
)
def test_nonsense_is_named(model, change, words):
    with pytest.raises(ModelLoadError, match=words):
        config_from_hf({**published(model), **change})


def test_an_interval_of_no_layers_is_read():
    config_from_hf({**published("SmolLM3, shortest"), "no_rope_layer_interval": 0})


@pytest.mark.parametrize("kind", [["gemma3_text"], {}, 3, None])
def test_the_kind_of_a_text_part_is_a_word(kind):
    wrapper = {"architectures": [["x"], "Gemma3ForConditionalGeneration"], "text_config": {"model_type": kind}}
    with pytest.raises(ModelLoadError, match=r"Gemma3ForConditionalGeneration around .* is not supported"):
        config_from_hf(wrapper)


# GGUF files

GGUF_NAMES = [name for model in ARCHITECTURES.values() for name in model.gguf_names]
GGUF_SETTINGS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "logit_scale"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base", "rope.freq_base_swa"),
    *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.yarn_beta_fast", "residual_scale"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.original_context_length", "attention.sliding_window", "embedding_scale"),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.scale", "expert_count"),
    *("expert_used_count", "expert_feed_forward_length", "expert_shared_count", "expert_gating_func", "expert_weights_scale"),
    *("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step", "expert_shared_feed_forward_length"),
)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("nonsense") / "m.gguf"
    return GGUFFile(write_gguf(path, oracle_model("llama"), "llama"))


def metadata_of(name: str, file: GGUFFile) -> dict[str, Any]:
    common = {f"{name}.{key.removeprefix('llama.')}": value for key, value in file.metadata.items()}
    more = {"logit_scale": 0.5, "attention.layer_norm_epsilon": 1e-5, "attention.sliding_window": 4, "attention.scale": 0.25}
    experts = {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 8,
        "expert_shared_feed_forward_length": 8,
    }
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    found = {f"{name}.{key}": value for key, value in {**more, **experts, **scaling}.items()}
    return {**file.metadata, **common, **found, "general.architecture": name}


@pytest.mark.parametrize(("number", "name"), list(enumerate(GGUF_NAMES)), ids=GGUF_NAMES)
def test_some_nonsense_in_every_setting_of_a_gguf_file(number, name, gguf_file, monkeypatch):
    """Which values a setting gets differs between the families."""
    good, step = metadata_of(name, gguf_file), len(NONSENSE) // AT_A_TIME
    for place, key in enumerate(GGUF_SETTINGS):
        for value in NONSENSE[(place + number) % step :: step]:
            monkeypatch.setattr(gguf_file, "metadata", {**good, f"{name}.{key}": value})
            refused_or_read_from(gguf_file)


@pytest.mark.slow
@pytest.mark.parametrize("name", GGUF_NAMES)
def test_all_nonsense_in_every_setting_of_a_gguf_file(name, gguf_file, monkeypatch):
    good = metadata_of(name, gguf_file)
    for key in GGUF_SETTINGS:
        for value in NONSENSE:
            monkeypatch.setattr(gguf_file, "metadata", {**good, f"{name}.{key}": value})
            refused_or_read_from(gguf_file)


def refused_or_read_from(gguf_file: GGUFFile) -> None:
    assert names_its_place(refusal(lambda: config_from_gguf(gguf_file)), str(gguf_file.path))


@pytest.mark.parametrize("further", [-(2**31), -1, 3, 2**32])
def test_layers_that_predict_more_are_some_of_all(further, gguf_file, monkeypatch):
    good = metadata_of("glm4moe", gguf_file)
    monkeypatch.setattr(gguf_file, "metadata", {**good, "glm4moe.nextn_predict_layers": further})
    with pytest.raises(ModelLoadError, match=r"m\.gguf: .* of 3 layers predict further tokens"):
        config_from_gguf(gguf_file)


@pytest.mark.parametrize(("key", "value"), [("yarn_ext_factor", 0.5), ("yarn_log_multiplier", 0.1)])
def test_yarn_settings_that_are_not_computed_are_refused(key, value, gguf_file, monkeypatch):
    good = metadata_of("qwen2", gguf_file) | {"qwen2.expert_count": 0, "qwen2.attention.sliding_window": 0}
    monkeypatch.setattr(gguf_file, "metadata", good)
    assert config_from_gguf(gguf_file).rope.scaling is not None
    monkeypatch.setattr(gguf_file, "metadata", {**good, f"qwen2.rope.scaling.{key}": value})
    with pytest.raises(ModelLoadError, match=f"rotary scaling yarn with {key} is not supported"):
        config_from_gguf(gguf_file)
