"""Checkpoints in fp8 with a scale for every block of 128 x 128, as DeepSeek and Qwen publish them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128
LARGEST = 448.0
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def spread(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """The scale of every weight."""
    return scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weights in fp8, and their scales float32 [blocks, blocks]."""
    rows, width = (-(-extent // BLOCK) * BLOCK for extent in weight.shape)
    whole = torch.zeros(rows, width, device=weight.device)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    largest = whole.view(rows // BLOCK, BLOCK, width // BLOCK, BLOCK).abs().amax((1, 3))
    scales = largest.clamp(min=1e-12) / LARGEST
    return (weight.float() / spread(scales, weight.shape)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def meant(packed: Tensor, scales: Tensor) -> Tensor:
    """The oracle: float32."""
    return packed.float() * spread(scales.float(), packed.shape)


def is_quantised(name: str, kept: Collection[str]) -> bool:
    return "_proj.weight" in name and not any(name.startswith(f"{module}.") for module in kept)


def write_in_fp8(folder: Path, kept: Collection[str] = (), scale_type: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Turns a folder's one file of weights into such a checkpoint. What its weights are then, in float32.

    kept: modules that stay as they are (`modules_to_not_convert`).
    """
    path, config = folder / "model.safetensors", folder / "config.json"
    stored, true = {}, {}
    for name, tensor in load_file(path).items():
        true[name] = stored[name] = tensor
        if is_quantised(name, kept):
            packed, scales = in_blocks(tensor)
            stored[name], stored[f"{name}_scale_inv"] = packed, scales.to(scale_type)
            true[name] = meant(packed, scales.to(scale_type))
    save_file(stored, path)
    routers = [name.removesuffix(".weight") for name in true if name.endswith(".mlp.gate.weight")]
    settings = {**SETTINGS, "modules_to_not_convert": ["lm_head", *routers, *kept]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": settings}))
    return true


def write_unpacked(folder: Path, true: dict[str, Tensor]) -> Path:
    """Turns such a checkpoint into a plain one of these weights."""
    save_file(true, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
