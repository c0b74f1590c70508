"""A fixed amount of work for the C kernels, for the case `kernels` of bench/compare.py: steps of a small random model.

    python bench/decoder_steps.py [--steps 60]

Weights in floats, 8 and 4 bits, and experts in 4 bits: prompts of 128 tokens, each in one step, then steps in which 8 sequences
decode. One process and one thread; scheduling and sampling are some per cent of it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from baton.models.config import Experts, ModelConfig, RopeConfig, Traits
from baton.testing.platforms import on_device
from baton.testing.step_rig import StepRig

DENSE = ModelConfig(
    architecture="qwen3", vocab_size=2048, layers=4, hidden_size=512, heads=8, kv_heads=4, head_dim=64,
    intermediate_size=1536, rope=RopeConfig(), norm_eps=1e-6, tied_embeddings=False, context_tokens_max=1024,
    traits=Traits(qk_norm=True),
)  # fmt: skip
MIXTURE = replace(DENSE, architecture="qwen3_moe", experts=Experts(count=8, per_token=2, inner_size=512, normalised=True))
CASES = [(DENSE, "none"), (DENSE, "int8"), (DENSE, "int4"), (MIXTURE, "int4")]
SEQUENCES, PROMPT = 8, 128


def run(config: ModelConfig, quantization: str, steps: int) -> None:
    platform = on_device("cpu", config=config, compute="native", quantization=quantization, tokens_per_step=PROMPT)
    rig = StepRig(platform.model(), slots=SEQUENCES, blocks=256, block_size=16, tokens_per_step=PROMPT)
    tokens = np.random.default_rng(1).integers(0, 96, (SEQUENCES, PROMPT)).tolist()
    for number, prompt in enumerate(tokens):
        rig.submit(f"r{number}", prompt, max_tokens=steps)
    rig.run()
    assert sum(len(found) for found in rig.tokens.values()) == SEQUENCES * steps
    rig.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="tokens per sequence")
    steps = parser.parse_args().steps
    for config, quantization in CASES:
        run(config, quantization, steps)


if __name__ == "__main__":
    main()
