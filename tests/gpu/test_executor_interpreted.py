"""The GPU's executor through the real core and runner, with its kernels in Triton's interpreter: what it writes to the
device, and when. On a GPU test_cuda_executor.py runs the same and more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "worker"))

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
if Path("/dev/nvidia0").exists():
    pytest.skip("Triton's interpreter and compiler do not share a process; the GPU's tests run here", allow_module_level=True)

from interpreted_steps import InterpretedSteps  # noqa: E402
from mended_interpreter import mend_interpreter  # noqa: E402
from rig import Rig, RigModel  # noqa: E402

from baton.config import WorkerConfig  # noqa: E402
from baton.kvpool.layout import KVKind  # noqa: E402
from baton.models.config import ModelConfig, RopeConfig, Traits  # noqa: E402
from baton.models.loaders.dummy import DummyWeights  # noqa: E402
from baton.models.loaders.weights import RawWeights  # noqa: E402
from baton.models.open import OpenedModel  # noqa: E402
from baton.models.torch_weights import Weights  # noqa: E402
from baton.protocol.request import FinishReason  # noqa: E402
from baton.protocol.thinking import Thinking  # noqa: E402
from baton.worker.cuda.decoder_step import DecoderStep, StepLimits  # noqa: E402
from baton.worker.cuda.executor import CudaExecutor  # noqa: E402
from baton.worker.cuda.weights import take_weights  # noqa: E402
from baton.worker.executors.base import LoadedExecutor  # noqa: E402
from baton.worker.platforms.cpu import CpuPlatform  # noqa: E402

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=61,
    layers=2,
    hidden_size=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=32,
    rope=RopeConfig(theta=10000.0),
    norm_eps=1e-5,
    tied_embeddings=False,
    context_tokens_max=96,
    traits=Traits(qk_norm=True),
)
LIMITS = StepLimits(rows=64, sequences=4, context_tokens=96)
RIG = {"slots": 4, "blocks": 24, "block_size": 16, "tokens_per_step": 64}
REQUESTS = {"a": [5, 3, 60, 60, 1, 2, 9], "b": [11], "c": [30, 2, 7, 7] * 6}


class Poisoned(DummyWeights):
    def raw(self, name):
        tensor = super().raw(name)
        if name == "embed.weight":
            tensor.data.view("float32")[50] = float("nan")
        return tensor


def interpreted(source: type[DummyWeights] = DummyWeights, *, fp8: bool = False) -> RigModel:
    """Its pool is a tensor; the rig's own is only counted."""
    raw = RawWeights(source(CONFIG, 3), CONFIG)
    weights = take_weights(CONFIG, Weights(raw).take, fp8=fp8)

    def with_pool(pool):
        layout = pool.layout
        shape = (pool.blocks, layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        step = DecoderStep(CONFIG, weights, torch.full(shape, float("nan")), LIMITS)
        return CudaExecutor(InterpretedSteps(step), "interpreter")

    return RigModel(CONFIG, LoadedExecutor(KVKind("float32"), with_pool))


@pytest.fixture(scope="module")
def model():
    mend_interpreter()
    return interpreted()


@pytest.fixture(scope="module")
def oracle():
    settings = WorkerConfig(quantization="none", compute="torch", threads=1)
    return RigModel(CONFIG, CpuPlatform().load(OpenedModel(Path(), CONFIG, DummyWeights(CONFIG, 3)), settings))


def answers(model, requests=REQUESTS, rig=None, **sampling):
    one = Rig(model, **RIG, **(rig or {}))
    for name, prompt in requests.items():
        one.submit(name, prompt, **{"max_tokens": 5, **sampling})
    one.run()
    return one


@pytest.mark.parametrize("chunk", [5, pytest.param(None, marks=pytest.mark.slow)])
def test_steps_launched_ahead_give_the_tokens_of_the_oracle(model, oracle, chunk):
    ours = answers(model, rig={"chunk": chunk})
    assert ours.runner.steps_ahead == 2
    assert ours.tokens == answers(oracle).tokens
    assert set(ours.runner.executor._steps.kinds) == {"decode", "mixed"}


@pytest.mark.slow
def test_preempted_sequences_and_shared_blocks(model, oracle):
    requests = {**REQUESTS, "d": [30, 2, 7, 7] * 6 + [1], "e": [8] * 20}
    tight = answers(model, requests, {"chunk": 20}, max_tokens=4)
    assert tight.tokens == answers(oracle, requests, max_tokens=4).tokens


@pytest.mark.slow
def test_draws_by_slot_s_columns(model, oracle):
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
    requests = {name: REQUESTS[name] for name in ("a", "b")}
    ours, theirs = (answers(of, requests, n=2, max_tokens=3, **sampling) for of in (model, oracle))
    assert ours.tokens == theirs.tokens


@pytest.mark.slow
def test_nobody_waits_for_penalties_and_the_like(model, oracle):
    """What depends on the tokens so far is right although the host does not know the last one."""

    def mixed(of):
        rig = Rig(of, **RIG)
        rig.submit("penalised", REQUESTS["a"], max_tokens=6, presence_penalty=1.0, repetition_penalty=1.3)
        rig.submit("plain", REQUESTS["c"], max_tokens=6)
        rig.submit("thinks", REQUESTS["c"], max_tokens=6, thinking=Thinking(end=5, budget=2, is_open=True))
        rig.submit("told", REQUESTS["b"], max_tokens=4, logprobs=2, logit_bias=((7, 2.0), (9, -5.0)))
        rig.submit("banned", REQUESTS["b"], max_tokens=6, bad_words=words, min_tokens=3, stop_token_ids=tuple(range(30)))
        rig.run()
        return rig

    free = answers(oracle, {"b": REQUESTS["b"]}, max_tokens=6).tokens["b", 0]
    words = ((free[0], free[1]), (free[2],), tuple(free[:3]))
    ours, theirs = mixed(model), mixed(oracle)
    assert ours.tokens == theirs.tokens
    assert ours.tokens["thinks", 0][2] == 5
    assert not ours.runner.executor.samples_on_host
    for position, word in theirs.words("told").items():
        assert ours.words("told")[position].logprob == pytest.approx(word.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [9, None])
def test_log_probabilities_of_prompts(model, oracle, chunk):
    requests = {"a": REQUESTS["a"], "c": REQUESTS["c"]}
    ours, theirs = (answers(of, requests, {"chunk": chunk}, prompt_logprobs=1, max_tokens=2) for of in (model, oracle))
    for name in requests:
        assert sorted(ours.words(name)) == sorted(theirs.words(name))
        for position, word in theirs.words(name).items():
            assert ours.words(name)[position].token == word.token
            assert ours.words(name)[position].logprob == pytest.approx(word.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, None])
def test_not_a_number_ends_one_sequence_only(model, chunk):
    requests = {"well": [1, 2, 3], "sick": [1, 2, 50, 4, 5, 6]}
    rig = answers(interpreted(Poisoned), requests, {"chunk": chunk}, max_tokens=4)
    assert rig.ended["sick", 0].reason is FinishReason.ERROR
    assert "NaN" in rig.ended["sick", 0].detail
    assert rig.tokens["well", 0] == answers(model, {"well": [1, 2, 3]}, max_tokens=4).tokens["well", 0]


@pytest.mark.slow
def test_weights_in_8_bits_change_little(oracle):
    """What the model thinks of a prompt: chunks, one row, and rows of both kinds."""
    requests = {"a": REQUESTS["a"], "c": REQUESTS["c"]}
    eight = interpreted(fp8=True)
    ours, theirs = (answers(of, requests, {"chunk": 9}, prompt_logprobs=0, max_tokens=2) for of in (eight, oracle))
    assert "fp8" in ours.runner.executor.arithmetic
    for name in requests:
        for position in list(theirs.words(name))[: len(requests[name]) - 1]:
            assert ours.words(name)[position].logprob == pytest.approx(theirs.words(name)[position].logprob, abs=0.6)
