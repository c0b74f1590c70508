"""Every class of encoder on a GPU: transformers' vectors and logits in float32, near them in bfloat16; a whole worker."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("worker", "models")]
import torch
from rig import Rig, RigModel
from tiny_encoders import CASES, write_encoder

from baton.config import WorkerConfig
from baton.models.open import open_encoder
from baton.worker.build import build_worker
from baton.worker.encoders import load_encoder

PROMPTS = {f"p{count}": [2, *(5 + (7 * place + count) % 90 for place in range(count)), 3] for count in (1, 5, 5, 17, 40)}


def answers(folder, dtype: str, **sampling) -> dict[str, np.ndarray]:
    from baton.worker.platforms.cuda import CudaPlatform

    opened, platform = open_encoder(folder), CudaPlatform()
    settings = WorkerConfig(quantization="none", dtype=dtype, device="cuda")
    rig = Rig(RigModel(opened.config, load_encoder(platform, opened, settings, None), platform), chunk=7, block_size=16)
    for name, prompt in PROMPTS.items():
        rig.submit(name, prompt, max_tokens=1, **sampling)
    rig.run()
    rows = {name: next(row.embedding for row in rows if row.embedding) for (name, _), rows in rig.logprobs.items()}
    return {name: np.frombuffer(row, "<f4") for name, row in rows.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(gpu, case, dtype, tmp_path):
    oracle = write_encoder(tmp_path, case)
    classes = open_encoder(tmp_path).config.head
    asked = {"pooling": "cls", "label_ids": tuple(range(len(classes.labels)))} if classes else {"pooling": "mean"}
    found = answers(tmp_path, dtype, **asked)
    worst = 0.0
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            if classes:
                expected = oracle(input_ids=torch.tensor([prompt])).logits[0].numpy()
            else:
                mean = oracle.base_model(input_ids=torch.tensor([prompt]))[0][0].mean(0)
                expected = torch.nn.functional.normalize(mean, dim=0).numpy()
        worst = max(worst, float(np.abs(found[name] - expected).max()))
    print(f"{case} {dtype}: {worst:.2e}")
    # Weights of these models are large, and bfloat16 has 8 bits: logits of several units are off by tenths.
    assert worst < (1e-4 if dtype == "float32" else 0.6 if classes else 0.1)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", ["modernbert", "xlm-roberta-reranker"])
def test_a_worker_measures_its_memory_and_starts(gpu, case, tmp_path):
    """The profile runs the largest step; the pool is as large as all slots need, and no larger."""
    write_encoder(tmp_path, case)
    built = build_worker(WorkerConfig(model=str(tmp_path), device="cuda", slots=8, tokens_per_step=256, block_size=16))
    try:
        assert not built.generates
        assert built.runner.pool.blocks == 8 * -(-built.context_tokens // 16)
        print(built.pool_plan)
    finally:
        built.runner.close()
