"""Every family through the GPU's platform, by our kernels or in torch: the greedy tokens of transformers, in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("worker", "models")]
from rig import RigModel, generate
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_model

from baton.config import WorkerConfig
from baton.models.open import open_model

OUTPUT_TOKENS = 8
EVERY_PROMPT = {f"p{i}": prompt for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(gpu, case, tmp_path):
    from baton.worker.platforms.cuda import CudaPlatform
    from baton.worker.platforms.lacks import cuda_lacks

    oracle = oracle_model(case)
    oracle.save_pretrained(tmp_path)
    expected = {(name, 0): oracle_greedy(oracle, prompt, OUTPUT_TOKENS) for name, prompt in EVERY_PROMPT.items()}
    opened, platform = open_model(tmp_path), CudaPlatform()
    settings = WorkerConfig(quantization="none", dtype="float32", device="cuda", compute="auto")
    model = RigModel(opened.config, platform.load(opened, settings), platform)
    print(case, cuda_lacks(opened.config) or "kernels")
    assert generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"block_size": 16}) == expected
