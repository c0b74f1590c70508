"""Checkpoints in fp8, served whole: every answer is that of a checkpoint with the same weights in float32.

The oracle is `LLM` in this process, one prompt at a time, on a folder that was unpacked beforehand with torch. Both compute on
the same floats: what differs is the last bit, where torch multiplies a batch of another size (experts on a CPU).
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
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
GAP_MIN = 1e-4
"""Of the log-probabilities of the two best tokens. Rounding moves one by about 1e-6."""


@pytest.fixture(scope="module", params=SHAPES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_both(tmp_path_factory.mktemp("models"), SHAPES[request.param])


def make_both(folder: Path, shape: dict[str, Any]) -> tuple[Path, Path]:
    """The same weights in fp8 and in float32."""
    packed = make_model(folder / "fp8", **shape)
    true = write_in_fp8(packed, kept=("model.layers.0.self_attn.k_proj",))
    return packed, write_unpacked(Path(shutil.copytree(packed, folder / "plain")), true)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]


def expected(folder: Path, settings: dict[str, Any]) -> list[Answer]:
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    with LLM(str(folder), **{"threads": 1, **ON_DEVICE, **settings}) as llm:
        outputs = [llm.generate(prompt, sampling)[0].outputs[0] for prompt in PROMPTS]
    for output in outputs:
        assert min(entry.top[0][1] - entry.top[1][1] for entry in output.logprobs) > GAP_MIN, "a near-tie"
    return [Answer(output.token_ids, [entry.logprob for entry in output.logprobs]) for output in outputs]


def served(folder: Path, scratch: Path, settings: dict[str, Any]) -> list[Answer]:
    """All at once."""
    body = {"prompt": list(PROMPTS), "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
    with Server(folder, scratch, chunk_tokens_max=16, **settings).wait_ready() as server:
        reply = server.ask("/v1/completions", {**body, "logprobs": 1, "return_token_ids": True})
        assert reply.status == 200, reply.content
    return [Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in reply.json["choices"]]


def compare(found: list[Answer], wanted: list[Answer], bound: float) -> None:
    """bound: of differences of log-probabilities."""
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)
    assert len({tuple(answer.tokens) for answer in found}) == len(PROMPTS), "the prompt matters"


def test_answers_are_those_of_the_weights_in_float32(folders: tuple[Path, Path], tmp_path: Path):
    packed, plain = folders
    settings = {"quantization": "none", "kv_blocks": 256, "block_size": 4}
    compare(served(packed, tmp_path, settings), expected(plain, settings), 1e-5)


def test_a_server_says_which_scales_are_missing(tiny: Path, tmp_path: Path):
    broken = Path(shutil.copytree(tiny, tmp_path / "broken"))
    write_in_fp8(broken)
    tensors, name = load_file(broken / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, broken / "model.safetensors")
    with Server(broken, tmp_path) as server:
        assert server.wait_ended() == 1
        (line,) = [line for line in server.errors.splitlines() if line.startswith("ERROR")]
    assert f"{name}: fp8 without scales" in line
