"""Every family through the GPU's platform, by our kernels or in torch: the greedy tokens of transformers, in float32."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("worker", "models")]
from packed_folders import METHODS, write_packed
from rig import RigModel, generate
from test_gguf_families import FAMILIES, round_experts, write
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_model

from baton.config import WorkerConfig
from baton.models.open import open_model

OUTPUT_TOKENS = 8
EVERY_PROMPT = {f"p{i}": prompt for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(gpu, case, tmp_path):
    oracle = oracle_model(case)
    oracle.save_pretrained(tmp_path)
    check(tmp_path, oracle)


@pytest.mark.parametrize("method", METHODS)
def test_folders_in_four_bits(gpu, method, tmp_path):
    """They are unpacked while they load."""
    check(tmp_path, write_packed(tmp_path, method))


@pytest.mark.parametrize("case", ["phi3", "glm4-moe", "qwen3-moe", "gpt-oss"])
def test_gguf_files(gpu, case, tmp_path):
    """So are they."""
    oracle = oracle_model(case)
    if case == "gpt-oss":
        round_experts(oracle)
    check(write(tmp_path / "m.gguf", oracle, *FAMILIES[case]), oracle)


def check(path: Path, oracle: Any) -> None:
    from baton.worker.platforms.cuda import CudaPlatform
    from baton.worker.platforms.lacks import cuda_lacks

    expected = {(name, 0): oracle_greedy(oracle, prompt, OUTPUT_TOKENS) for name, prompt in EVERY_PROMPT.items()}
    opened, platform = open_model(path), CudaPlatform()
    settings = WorkerConfig(quantization="none", dtype="float32", device="cuda", compute="auto")
    model = RigModel(opened.config, platform.load(opened, settings), platform)
    print(path.name, cuda_lacks(opened.config) or "kernels")
    assert generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"block_size": 16}) == expected
