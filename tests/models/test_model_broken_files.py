"""Everything that can be wrong with a model's files, and the sentence each of them earns."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import CASES, oracle_model

from baton.errors import EngineError, ModelFileBroken, ModelLoadError, ModelNotFound, ModelUnsupported
from baton.models.loaders.weights import RawWeights
from baton.models.open import open_model
from dense_oracle import all_logits, load_model

PICKLE = b"\x80\x04cposix\nsystem\n(S'false'\ntR."


@pytest.fixture
def folder(tmp_path):
    oracle_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    oracle_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_the_errors_are_one_family():
    for leaf in (ModelNotFound, ModelUnsupported, ModelFileBroken):
        assert issubclass(leaf, ModelLoadError)
    assert issubclass(ModelLoadError, EngineError)


class TestTensors:
    def test_missing(self, folder):
        edit_tensors(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
        with pytest.raises(ModelFileBroken, match=r"1 of 30 tensors are missing: layers\.1\.attention\.k\.weight"):
            load_model(folder)

    def test_many_missing_are_counted(self, folder):
        edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if "layers.2" in name])
        with pytest.raises(ModelFileBroken, match=r"9 of 30 tensors are missing: .* and 4 more"):
            load_model(folder)

    def test_extra(self, folder):
        edit_tensors(folder, lambda t: t.update({"model.layers.0.adapter.weight": torch.ones(2)}))
        message = r"1 tensors have no place .*model\.safetensors: model\.layers\.0\.adapter\.weight"
        with pytest.raises(ModelFileBroken, match=message):
            load_model(folder)

    def test_a_layer_too_many(self, folder):
        edit_config(folder, num_hidden_layers=2)
        with pytest.raises(ModelFileBroken, match=r"9 tensors have no place .*model\.layers\.2\."):
            load_model(folder)

    def test_wrong_shape(self, folder):
        edit_tensors(folder, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(56, 41)}))
        message = r"mlp\.up_proj\.weight: the shape is \[56, 41\], but the config asks for \[56, 42\]"
        with pytest.raises(ModelFileBroken, match=message):
            load_model(folder)

    def test_wrong_type(self, folder):
        edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(42, dtype=torch.int8)}))
        with pytest.raises(ModelUnsupported, match=r"model\.norm\.weight: type I8 .*F64, F32, F16, BF16"):
            load_model(folder)

    @pytest.mark.parametrize(
        ("case", "module", "rows"), [("phi3", "self_attn.k_proj", 32), ("phi3", "mlp.up_proj", 56)], ids=["qkv", "gate_up"]
    )
    def test_a_part_beside_the_fused_matrix(self, tmp_path, case, module, rows):
        oracle_model(case).save_pretrained(tmp_path)
        edit_tensors(tmp_path, lambda t: t.update({f"model.layers.1.{module}.weight": torch.zeros(rows, 42)}))
        with pytest.raises(ModelFileBroken, match=rf"_proj\.weight: .* is also stored as .*{module}\.weight"):
            open_model(tmp_path)

    def test_nothing_is_read_before_the_check(self, folder):
        edit_tensors(folder, lambda t: t.pop("model.norm.weight"))
        seen = []
        with pytest.raises(ModelFileBroken):
            load_model(folder, progress=lambda done, total: seen.append(done))
        assert seen == []


class TestSafetensors:
    @pytest.mark.parametrize("keep", [0, 5, 300, -1])
    def test_truncated(self, folder, keep):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelFileBroken, match=r"model\.safetensors: not a whole safetensors file"):
            load_model(folder)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda table: {**table, "model.norm.weight": {**table["model.norm.weight"], "data_offsets": [0, 168]}},
            lambda table: {**table, "model.norm.weight": {**table["model.norm.weight"], "data_offsets": [-168, 0]}},
            lambda table: {**table, "model.norm.weight": {**table["model.norm.weight"], "data_offsets": [2**70, 2**71]}},
            lambda table: {**table, "model.norm.weight": {**table["model.norm.weight"], "data_offsets": [1.0, 2.0]}},
            lambda table: {**table, "model.norm.weight": {**table["model.norm.weight"], "shape": [True, 42]}},
            lambda table: {**table, "model.norm.weight": {**table["model.norm.weight"], "shape": None}},
            lambda table: {**table, "model.norm.weight": {"dtype": "F32"}},
            lambda table: {**table, "model.norm.weight": [1]},
            lambda table: {name: entry for name, entry in table.items() if name != "model.norm.weight"},
            lambda table: list(table),
            lambda table: "nonsense",
        ],
    )
    def test_a_table_that_does_not_describe_the_data(self, folder, edit):
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        (length,) = struct.unpack_from("<Q", whole)
        table = json.dumps(edit(json.loads(whole[8 : 8 + length]))).encode()
        path.write_bytes(struct.pack("<Q", len(table)) + table + whole[8 + length :])
        with pytest.raises(ModelFileBroken, match=r"model\.safetensors: not a whole safetensors file"):
            load_model(folder)

    def test_a_shape_that_is_not_its_bytes(self, folder):
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        entry = b'"model.norm.weight":{"dtype":"F32","shape":[42]'
        wrong = whole.replace(entry, entry.replace(b"42", b"24"))
        assert wrong != whole
        path.write_bytes(wrong)
        with pytest.raises(ModelFileBroken, match=r"model\.norm\.weight: 168 bytes cannot be \[24\] of F32"):
            load_model(folder)

    def test_flipped_bits_are_refused_or_harmless(self, folder):
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        (length,) = struct.unpack_from("<Q", whole)
        rng = random.Random(7)
        refused = 0
        for _ in range(300):
            broken = bytearray(whole)
            broken[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            try:
                load_model(folder)
            except ModelLoadError:
                refused += 1
        assert refused > 150

    def test_a_table_of_any_length(self, folder):
        """Nothing says that the data begin at a whole word."""
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        expected = all_logits(load_model(folder).model, [1, 2, 3])
        (length,) = struct.unpack_from("<Q", whole)
        path.write_bytes(struct.pack("<Q", length + 3) + whole[8 : 8 + length] + b"   " + whole[8 + length :])
        assert torch.equal(all_logits(load_model(folder).model, [1, 2, 3]), expected)

    def test_a_shard_is_missing(self, sharded):
        victim = sorted(sharded.glob("*.safetensors"))[1]
        victim.unlink()
        with pytest.raises(ModelFileBroken, match=rf"index\.json: the shard {victim.name} is not in the folder"):
            load_model(sharded)

    def test_a_shard_lacks_what_the_index_promises(self, sharded):
        victim = sorted(sharded.glob("*.safetensors"))[1]
        save_file({}, victim)
        with pytest.raises(ModelFileBroken, match=r"index\.json: \d+ tensors are in no shard, the first is model\."):
            load_model(sharded)

    def test_a_tensor_is_in_two_shards(self, sharded):
        first, second = sorted(sharded.glob("*.safetensors"))[:2]
        save_file({**load_file(second), **load_file(first)}, second)
        with pytest.raises(ModelFileBroken, match="also stored as"):
            load_model(sharded)

    def test_an_index_cannot_point_outside(self, sharded):
        path = sharded / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))
        with pytest.raises(ModelFileBroken, match="not a plain file name in the same folder"):
            load_model(sharded)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
    def test_a_broken_index(self, sharded, text):
        (sharded / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelFileBroken, match=r"index\.json: not a readable index"):
            load_model(sharded)

    def test_pickles_only(self, folder):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(PICKLE)
        message = r"pickle files \(pytorch_model\.bin\).*convert them to safetensors"
        with pytest.raises(ModelUnsupported, match=message):
            load_model(folder)

    def test_a_pickle_beside_safetensors_is_left_alone(self, folder):
        (folder / "pytorch_model.bin").write_bytes(PICKLE)
        load_model(folder)

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
            load_model(folder)

    def test_a_file_that_may_not_be_read(self, folder, monkeypatch):
        opened = Path.open

        def refuse(path, *mode, **how):
            if path.suffix == ".safetensors":
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *mode, **how)

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(ModelFileBroken, match=r"model\.safetensors: cannot be read \(Permission denied\); let the user"):
            load_model(folder)

    def test_a_git_lfs_pointer(self, folder):
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        with pytest.raises(ModelFileBroken, match=r"Git LFS pointer.*git lfs pull"):
            load_model(folder)


class TestConfig:
    def test_unknown_architecture(self, folder):
        edit_config(folder, architectures=["MambaForCausalLM"])
        message = (
            r"config\.json: architecture MambaForCausalLM is not supported \(Baton lacks state-space layers\); "
            r"supported are LlamaForCausalLM, "
            r"MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
        )
        with pytest.raises(ModelUnsupported, match=message):
            load_model(folder)

    @pytest.mark.parametrize("value", ["absent", None, []])
    def test_no_architecture(self, folder, value):
        edit_config(folder, architectures=value)
        with pytest.raises(ModelUnsupported, match=r"architecture \(none given\) is not supported"):
            load_model(folder)

    @pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
    def test_not_json(self, folder, text):
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ModelFileBroken, match=r"config\.json"):
            load_model(folder)

    @pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"])
    def test_a_missing_setting(self, folder, key):
        edit_config(folder, **{key: "absent"})
        with pytest.raises(ModelFileBroken, match=rf"config\.json: the setting {key} is missing"):
            load_model(folder)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"hidden_size": "42"}, ModelFileBroken, "hidden_size is '42'; it must be a whole number"),
            ({"tie_word_embeddings": 1}, ModelFileBroken, "tie_word_embeddings is 1; it must be true or false"),
            ({"num_key_value_heads": 4}, ModelUnsupported, "6 query heads cannot be shared evenly among 4"),
            ({"num_hidden_layers": 0}, ModelUnsupported, "layers is 0: it must be at least 1"),
            ({"head_dim": 15}, ModelUnsupported, "head_dim is 15: .*must be even"),
            ({"hidden_act": "gelu"}, ModelUnsupported, "activation gelu is not supported"),
            ({"quantization_config": {"quant_method": "bitsandbytes"}}, ModelUnsupported, r"quantised \(bitsandbytes\); supp"),
            ({"rope_parameters": {"rope_type": "longrope"}}, ModelFileBroken, "short_factor must be a list"),
            ({"rope_parameters": {"rope_type": "dynamic"}}, ModelUnsupported, "scaling dynamic is not supported"),
            ({"rope_parameters": {"rope_type": "linear"}}, ModelFileBroken, "the setting factor is missing"),
            ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ModelUnsupported, "rotary positions on 24 dimensions"),
            ({"rope_parameters": [1]}, ModelFileBroken, "rotary settings are"),
            ({"architectures": "LlamaForCausalLM"}, ModelFileBroken, "must be a list of names"),
        ],
    )
    def test_settings_we_cannot_run(self, folder, changes, error, message):
        edit_config(folder, **changes)
        with pytest.raises(error, match=message):
            load_model(folder)

    def test_unknown_layer_types(self, tmp_path):
        oracle_model("qwen2-window").save_pretrained(tmp_path)
        edit_config(tmp_path, layer_types=["full_attention", "chunked_attention", "full_attention"])
        with pytest.raises(ModelUnsupported, match=r"layer_types is .*sliding_attention, full_attention"):
            load_model(tmp_path)


def first_cases() -> list[str]:
    """A case of every family."""
    found: dict[str, str] = {}
    for case, (family, _) in CASES.items():
        found.setdefault(family, case)
    return list(found.values())


@pytest.mark.parametrize("case", first_cases())
def test_every_family_refuses_sizes_that_are_not_its_tensors(case, tmp_path):
    """Before a tensor is read, and in a sentence that names the file."""
    oracle_model(case).save_pretrained(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    check(tmp_path)
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"):
        for lie in (2 * good[key], 2**31):
            changes = {key: lie}
            if key == "num_hidden_layers" and "layer_types" in good:
                changes["layer_types"] = (good["layer_types"] * lie)[:lie] if lie < 1000 else good["layer_types"]
            (tmp_path / "config.json").write_text(json.dumps({**good, **changes}))
            with pytest.raises(ModelLoadError, match=r"config|tensors|shape"):
                check(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(good))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ModelFileBroken, match="not a whole safetensors file"):
        check(tmp_path)
    path.write_bytes(whole)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelFileBroken, match=r"tensors are missing: final_norm\.weight"):
        check(tmp_path)


def check(folder):
    opened = open_model(folder)
    RawWeights(opened.weights, opened.config)


WEIRD = [None, 0, -1, 1, 3, 2**40, 1.5, -0.5, float("nan"), float("inf"), "x", "", True, [], [1], ["a"], {}, {"a": 1}]


NONSENSE = [
    *("llama-llama3", "mistral-window", "ernie-moe"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in ("llama-yarn", "qwen2-window", "phi3-longrope", "gemma3", "cohere2")
    ),
]


@pytest.mark.parametrize("case", NONSENSE)
def test_any_nonsense_in_a_config_is_refused_or_harmless(case, tmp_path):
    """Whatever one setting says, the answer is a model or an error of ours: never a stray exception, never a hang."""
    oracle_model(case).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    rope = good["rope_parameters"]
    configs = [{**good, key: value} for key in good for value in WEIRD]
    configs += [{**good, "rope_parameters": {**rope, key: value}} for key in rope for value in WEIRD]
    refused = 0
    for config in configs:
        path.write_text(json.dumps(config))
        try:
            model = load_model(tmp_path).model
        except ModelLoadError:
            refused += 1
        else:
            assert all_logits(model, [1, 2, 3]).isfinite().all(), config
    assert refused > len(configs) // 4


class TestGGUF:
    @pytest.fixture
    def oracle(self):
        return oracle_model("llama")

    @pytest.fixture
    def path(self, oracle, tmp_path):
        return write_gguf(tmp_path / "m.gguf", oracle, "llama")

    def test_not_gguf(self, path):
        path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])
        with pytest.raises(ModelFileBroken, match=r"m\.gguf: not a GGUF file"):
            load_model(path)

    def test_empty(self, path):
        path.write_bytes(b"")
        with pytest.raises(ModelFileBroken, match="not a GGUF file"):
            load_model(path)

    def test_truncated_anywhere(self, path):
        whole = path.read_bytes()
        data_start = len(whole) - 4 * sum(p.numel() for p in oracle_model("llama").parameters())
        for keep in [*range(4, data_start, 97), len(whole) - 40_000, len(whole) - 500]:
            path.write_bytes(whole[:keep])
            with pytest.raises(ModelFileBroken, match=r"m\.gguf: truncated.*the file has \d+\. Fetch it again"):
                load_model(path)

    def test_a_truncated_tensor_is_named(self, path):
        path.write_bytes(path.read_bytes()[:-500])
        with pytest.raises(ModelFileBroken, match=r"truncated; \S+\.weight ends at byte \d+"):
            load_model(path)

    def test_flipped_bits_are_refused_or_harmless(self, path):
        whole = path.read_bytes()
        header = whole.index(b"output_norm.weight")
        rng = random.Random(7)
        refused = 0
        for _ in range(600):
            broken = bytearray(whole)
            broken[rng.randrange(header)] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            try:
                open_model(path)
            except ModelLoadError:
                refused += 1
        assert refused > 60

    def test_absurd_counts_do_not_fill_the_memory(self, path):
        whole = bytearray(path.read_bytes())
        whole[8:24] = struct.pack("<QQ", 2**62, 2**62)
        path.write_bytes(whole)
        with pytest.raises(ModelFileBroken, match=r"truncated|unknown type|damaged"):
            load_model(path)

    @pytest.mark.parametrize("version", [1, 4, 3 << 24])
    def test_other_versions(self, path, version):
        whole = bytearray(path.read_bytes())
        whole[4:8] = struct.pack("<I", version)
        path.write_bytes(whole)
        with pytest.raises(ModelUnsupported, match=rf"GGUF version {version} .*versions 2, 3"):
            load_model(path)

    def test_unknown_architecture(self, oracle, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", oracle, "mamba")
        message = (
            r"architecture mamba is not supported \(Baton lacks .*\); supported are llama, mistral3, qwen2, qwen3, qwen2moe"
        )
        with pytest.raises(ModelUnsupported, match=message):
            load_model(path)

    def test_unknown_tensor_type(self, path):
        whole = path.read_bytes()
        # The entry of a tensor: name, two dimensions, type, offset.
        at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
        path.write_bytes(whole[:at] + struct.pack("<I", 10) + whole[at + 4 :])
        with pytest.raises(ModelUnsupported, match=r"blk\.0\.attn_q\.weight is of GGUF type number 10; .*Q4_1.*Q6_K"):
            load_model(path)

    def test_missing_tensor(self, oracle, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", oracle, "llama", drop=("blk.2.ffn_up.weight",))
        with pytest.raises(ModelFileBroken, match=r"1 of 30 tensors are missing: layers\.2\.mlp\.up\.weight"):
            load_model(path)

    def test_a_fused_tensor_beside_its_parts(self, oracle, tmp_path):
        extra = {"blk.0.attn_qkv.weight": np.ones((160, 42), np.float32)}
        path = write_gguf(tmp_path / "m.gguf", oracle, "llama", extra=extra)
        with pytest.raises(ModelFileBroken, match=r"attn_qkv\.weight: .* is also stored as .*blk\.0\.attn_q\.weight"):
            load_model(path)

    @pytest.mark.parametrize("twin", ["layers.0.mlp.up.weight", "final_norm.weight"])
    def test_two_names_of_one_tensor(self, oracle, tmp_path, twin):
        path = write_gguf(tmp_path / "m.gguf", oracle, "llama", extra={twin: np.ones((56, 42), np.float32)})
        with pytest.raises(ModelFileBroken, match=rf"{twin}: also stored as (blk\.0\.ffn_up|output_norm)\.weight"):
            load_model(path)

    def test_missing_embedding(self, oracle, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", oracle, "llama", drop=("token_embd.weight",))
        with pytest.raises(ModelFileBroken, match=r"token_embd\.weight is missing"):
            load_model(path)

    def test_extra_tensor(self, oracle, tmp_path):
        extra = {"blk.0.ffn_gate_inp.weight": np.ones((4, 42), np.float32)}
        path = write_gguf(tmp_path / "m.gguf", oracle, "llama", extra=extra)
        with pytest.raises(ModelFileBroken, match=r"no place .*m\.gguf: blk\.0\.ffn_gate_inp\.weight"):
            load_model(path)

    def test_norms_that_the_architecture_must_have(self, oracle, tmp_path):
        """A Qwen3 file without its head norms is broken, not a Qwen3 without norms."""
        path = write_gguf(tmp_path / "m.gguf", oracle, "qwen3")
        with pytest.raises(ModelFileBroken, match=r"missing: layers\.0\.attention\.q_norm\.weight"):
            load_model(path)

    @pytest.mark.parametrize(
        ("metadata", "error", "message"),
        [
            ({"block_count": None}, ModelFileBroken, r"the setting llama\.block_count is missing"),
            ({"feed_forward_length": 57}, ModelFileBroken, r"shape is \[56, 42\], but the config asks for \[57, 42\]"),
            ({"attention.head_count": 0}, ModelUnsupported, "heads is 0: it must be at least 1"),
            ({"expert_count": 8}, ModelFileBroken, "expert_used_count is missing"),
            ({"rope.dimension_count": 24}, ModelUnsupported, "rotary positions on 24 dimensions of heads that have 16"),
            ({"attention.value_length": 8}, ModelUnsupported, "value heads of 8 beside key heads of 16"),
            ({"attention.scale": 0.5}, ModelUnsupported, "attention scale 0.5"),
            ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, ModelUnsupported, "scaling longrope"),
        ],
    )
    def test_settings_we_cannot_run(self, oracle, tmp_path, metadata, error, message):
        path = write_gguf(tmp_path / "m.gguf", oracle, "llama", metadata=metadata)
        with pytest.raises(error, match=message):
            load_model(path)

    def test_a_window_on_qwen(self, tmp_path):
        metadata = {"attention.sliding_window": 4}
        path = write_gguf(tmp_path / "m.gguf", oracle_model("qwen3"), "qwen3", metadata=metadata)
        with pytest.raises(ModelUnsupported, match=r"sliding window \(4\) is not supported for qwen3"):
            load_model(path)

    def test_rotary_divisors_of_the_wrong_count(self, oracle, tmp_path):
        extra = {"rope_freqs.weight": np.ones(5, np.float32)}
        path = write_gguf(tmp_path / "m.gguf", oracle, "llama", extra=extra)
        with pytest.raises(ModelUnsupported, match="5 rotary divisors were given for 8 frequencies"):
            load_model(path)
