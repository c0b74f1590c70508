"""Folders in 4 bits as AWQ, GPTQ and compressed-tensors write them. Packed here from the formats' description, apart from the
loader; the oracle gets the values that the numbers stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import oracle_model

METHODS = ("awq", "gptq", "gptq-zeros", "gptq-order", "compressed-tensors", "compressed-zeros")
GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def write_packed(folder: Path, method: str, case: str = "llama", group: int = GROUP) -> Any:
    """Returns the oracle: a model of transformers with exactly the values of the folder. `group`: -1 for one of all inputs."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8} if group == 128 else {}
    oracle = oracle_model(case, **SIZES | wide | ({"moe_intermediate_size": 32} if "moe" in case else {}))
    oracle.save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = tensor
            continue
        codes, scales, zeros, groups = _quantised(tensor, method, generator, tensor.shape[1] if group == -1 else group)
        tensors[name] = (codes - zeros[:, groups]).float() * scales.float()[:, groups]
        parts = _packed(name.removesuffix(".weight"), codes, scales, zeros, groups, method)
        packed |= {part: value for part, value in parts.items() if part not in tensors}  # a bias may be there already
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    oracle = type(oracle).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings_of(method, group)}))
    return oracle


def settings_of(method: str, group: int = GROUP) -> dict[str, Any]:
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    if method.startswith("gptq"):
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": method == "gptq-order",
            "sym": method == "gptq",
        }
    weights = {
        "num_bits": 4,
        "group_size": group,
        "strategy": "channel" if group == -1 else "group",
        "type": "int",
        "symmetric": method != "compressed-zeros",
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}


def _quantised(tensor: torch.Tensor, method: str, generator: torch.Generator, group: int) -> tuple[torch.Tensor, ...]:
    outputs, inputs = tensor.shape
    count = inputs // group
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    scales = (torch.rand(outputs, count, generator=generator) * 0.04 + 0.01).half()
    zeros = torch.full((outputs, count), 8)
    if method in ("awq", "gptq-zeros", "gptq-order", "compressed-zeros"):
        zeros = torch.randint(5, 11, (outputs, count), generator=generator)
    groups = torch.arange(inputs) // group
    if method == "gptq-order":
        groups = groups[torch.randperm(inputs, generator=generator)]
    if method.startswith("compressed"):
        scales = scales.bfloat16().half()
    return codes, scales, zeros, groups


def _packed(
    module: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor, method: str
) -> dict[str, torch.Tensor]:
    if method == "awq":
        return {
            f"{module}.qweight": _words(codes.T, AWQ_COLUMNS),
            f"{module}.qzeros": _words(zeros.T, AWQ_COLUMNS),
            f"{module}.scales": scales.T,
        }
    if method.startswith("gptq"):
        return {
            f"{module}.qweight": _words(codes).T,
            f"{module}.qzeros": _words(zeros.T - 1),
            f"{module}.scales": scales.T,
            f"{module}.g_idx": groups.int(),
            f"{module}.bias": torch.zeros(len(codes)).half(),
        }
    more = {f"{module}.weight_zero_point": _words(zeros.T).T} if method == "compressed-zeros" else {}
    return {
        f"{module}.weight_packed": _words(codes),
        f"{module}.weight_scale": scales.bfloat16(),
        f"{module}.weight_shape": torch.tensor(codes.shape),
        **more,
    }


def _words(numbers: torch.Tensor, columns: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[rows, n] -> [rows, n / 8], the number of column `columns[i]` in bits 4 i to 4 i + 3."""
    eights = numbers.reshape(len(numbers), -1, 8).long()
    words = sum(eights[..., column] << (4 * bit) for bit, column in enumerate(columns))
    return (words - ((words >> 31) << 32)).int()
