"""The C kernels give transformers' logits and greedy tokens for the GGUF file of every family."""

from __future__ import annotations

import numpy as np
import pytest
from rig import forward_of, generate, load_path, one_step
from tiny_models import PROMPTS, oracle_greedy, oracle_logits

families = pytest.importorskip("test_gguf_families", reason="the files are written by the gguf package")


@pytest.mark.parametrize("case", families.FAMILIES)
def test_a_gguf_file_through_the_c_kernels(case, tmp_path):
    oracle, path = families.oracle_and_file(case, tmp_path / "m.gguf")
    model, prompt = load_path(path, compute="native"), PROMPTS[3]
    forward = forward_of(model)
    logits = forward.logits(forward.hidden(one_step([prompt])))
    np.testing.assert_allclose(logits, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
    forward.close()
    answers = generate(model, {"p": prompt}, max_tokens=4, rig={"chunk": 7, "block_size": 4})
    assert answers == {("p", 0): oracle_greedy(oracle, prompt, 4, answers["p", 0])}
