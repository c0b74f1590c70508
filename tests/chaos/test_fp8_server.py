"""Checkpoints in fp8, served whole: every answer is that of a checkpoint with the same weights in float32.

The oracle is `LLM` in this process, on a folder that was unpacked beforehand with torch. On a CPU both compute on the same
floats, so tokens and log-probabilities are equal to the last bit. So they are on a GPU with --deterministic, which unpacks.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_model import EXPERTS, make_model
from chaos_server import ON_DEVICE, Server

from baton.llm import LLM, SamplingParams

sys.path.append(str(Path(__file__).parent.parent / "models"))

from fp8_files import write_in_fp8, write_unpacked
from safetensors.torch import load_file, save_file

# More than one block, and a last one that is smaller.
WIDE = {"hidden_size": 160, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
SHAPES = {"dense": WIDE, "experts": {**WIDE, **EXPERTS, "moe_intermediate_size": 144}}
PROMPTS = ("once upon a time", "x", "the same again, and again, and again, and longer than a chunk")
LENGTH = 12


@pytest.fixture(scope="module", params=SHAPES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights in fp8 and in float32."""
    packed = make_model(tmp_path_factory.mktemp("fp8"), **SHAPES[request.param])
    true = write_in_fp8(packed, kept=("model.layers.0.self_attn.k_proj",))
    plain = Path(shutil.copytree(packed, tmp_path_factory.mktemp("plain") / "model"))
    return packed, write_unpacked(plain, true)


def expected(folder: Path, settings: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """One at a time."""
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=1)
    with LLM(str(folder), **{"threads": 1, **ON_DEVICE, **settings}, kv_blocks=256, block_size=4) as llm:
        outputs = [llm.generate(prompt, sampling)[0].outputs[0] for prompt in PROMPTS]
    return [(output.token_ids, [entry.logprob for entry in output.logprobs]) for output in outputs]


def answers_are_equal(folders: tuple[Path, Path], scratch: Path, **settings: Any) -> None:
    packed, plain = folders
    settings["quantization"] = "none"
    body = {"prompt": list(PROMPTS), "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
    with Server(packed, scratch, chunk_tokens_max=16, **settings).wait_ready() as server:
        reply = server.ask("/v1/completions", {**body, "logprobs": 1, "return_token_ids": True})
        assert reply.status == 200, reply.content
        server.wait_idle()
    found = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in reply.json["choices"]]
    assert found == expected(plain, settings)
    assert len({tuple(tokens) for tokens, _ in found}) == len(PROMPTS), "the prompt matters"


def test_answers_are_those_of_the_weights_in_float32(folders: tuple[Path, Path], tmp_path: Path):
    answers_are_equal(folders, tmp_path)


def test_a_server_says_which_scales_are_missing(folders: tuple[Path, Path], tmp_path: Path):
    broken = Path(shutil.copytree(folders[0], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.weight_scale_inv"))
    del tensors[name]
    save_file(tensors, broken / "model.safetensors")
    with Server(broken, tmp_path) as server:
        assert server.wait_ended() == 1
        (line,) = [line for line in server.errors.splitlines() if line.startswith("ERROR")]
    assert f"{name.removesuffix('_scale_inv')}: fp8 without scales" in line
