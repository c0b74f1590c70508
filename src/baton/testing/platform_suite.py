"""One contract for everything that computes: the same cases on every platform, against plain torch, in float32.

The real core and the real runner; requests come together, and the oracle answers them one by one. Chunks, preemptions, shared
blocks, lost workers and steps that are launched ahead must change nothing.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from baton.core.events import EvictSome, PreemptSome
from baton.errors import ModelUnsupported
from baton.protocol.grammar import Grammar
from baton.protocol.ids import PoolIncarnation
from baton.protocol.request import FinishReason
from baton.protocol.thinking import Thinking
from baton.testing.platforms import END, POISON, SCALINGS, TOKENS, PlatformUnderTest, all_traits, on_device
from baton.testing.step_rig import StepRig
from baton.worker.kv_layout import kv_layout
from baton.worker.platforms.base import Platform

REGEX = "(ab|c)+d{2,9}[0-9]{3}"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "p0": Grammar("regex", REGEX, ends=(END,)),
    "p1": Grammar("json_schema", json.dumps(SCHEMA), ends=(END,)),
    "p2": Grammar("choice", '["red", "green", "blue"]', ends=(END,)),
}
"""Settings of some requests. The others have none, and their tokens do not change."""


def _fits(name: str, text: str) -> bool:
    match name:
        case "p0":
            return re.fullmatch(REGEX, text) is not None
        case "p1":
            return json.loads(text)["n"] in range(100)
    return text in ("red", "green", "blue")


class PlatformConformance:
    """Tests of a platform. Subclass it in a test file, and name the device:

    class TestMyPlatform(PlatformConformance):
        device = "mine"
    """

    device: ClassVar[str] = ""
    "Name for --device: the platform's entry point must be installed."
    settings: ClassVar[dict[str, Any]] = {}
    "Further fields of WorkerConfig."
    same_bits: ClassVar[bool] = False
    "Whether the platform promises the same bits in any batch and in any chunks."

    @pytest.fixture(scope="class")
    @classmethod
    def platform(cls) -> PlatformUnderTest:
        pytest.importorskip("torch", reason="the oracle needs torch: pip install 'baton-serve[testing]'")
        return on_device(cls.device, same_bits=cls.same_bits, **cls.settings)

    # Facts and pools

    def test_memory_is_a_share_of_what_there_is(self, platform: PlatformUnderTest) -> None:
        hardware = _hardware(platform)
        runs: list[int] = []
        facts = hardware.memory()
        assert 0 < facts.free_bytes <= facts.total_bytes
        assert 0 <= hardware.memory_of_step(lambda: runs.append(1)) <= facts.total_bytes
        assert runs == [1], "the step runs once"

    def test_sizes_of_steps_leave_a_token_for_every_sequence(self, platform: PlatformUnderTest) -> None:
        sizes = _hardware(platform).step_defaults(1)
        assert 1 <= sizes.slots <= sizes.tokens_per_step
        assert sizes.prefill_tokens_beside_decodes >= 1

    def test_the_pool_is_of_the_kind_that_was_announced_before_loading(self, platform: PlatformUnderTest) -> None:
        hardware, settings = _hardware(platform), platform.settings
        assert settings is not None
        assert hardware.kv_kind(platform.config, settings) == platform.model().loaded.kv

    def test_pools_differ_and_close(self, platform: PlatformUnderTest) -> None:
        hardware = _hardware(platform)
        layout = kv_layout(platform.config, 16, platform.model().loaded.kv)
        pools = [hardware.create_pool(layout, blocks) for blocks in (1, 3)]
        assert [(pool.layout, pool.blocks) for pool in pools] == [(layout, 1), (layout, 3)]
        assert pools[0].incarnation != pools[1].incarnation
        named = hardware.create_pool(layout, 1, PoolIncarnation(7))
        assert named.incarnation == 7
        for pool in (*pools, named):
            pool.close()

    def test_a_pool_that_is_shared_is_attached_by_its_descriptor(self, platform: PlatformUnderTest) -> None:
        hardware = _hardware(platform)
        if not hardware.shares_pools:
            pytest.skip("its pools are private to the worker")
        pool = hardware.create_pool(kv_layout(platform.config, 16, platform.model().loaded.kv), 2)
        announced, descriptor = pool.announcement(), os.dup(pool.fd)
        assert (announced.fingerprint, announced.blocks) == (pool.layout.fingerprint(), 2)
        attached = hardware.attach_pool(descriptor, announced)
        assert (attached.layout, attached.blocks, attached.incarnation) == (pool.layout, 2, pool.incarnation)
        attached.close()
        pool.close()

    # Greedy tokens in any circumstances

    @pytest.mark.parametrize("chunk", [5, None])
    def test_greedy_tokens_in_any_chunks(self, platform: PlatformUnderTest, chunk: int | None) -> None:
        requests = platform.prompts(2 if platform.slow else 8, seed=0)
        assert platform.run(requests, {"chunk": chunk}).tokens == platform.oracle(requests).tokens

    def test_preempted_sequences_go_on_as_if_nothing_had_happened(self, platform: PlatformUnderTest) -> None:
        requests = platform.prompts(8, seed=1)

        def preempt(rig: StepRig, number: int) -> None:
            if number % 4 == 3:
                rig.dispatch(PreemptSome(1) if number % 8 == 3 else EvictSome(2))

        found = platform.run(requests, {"chunk": 9}, preempt)
        assert found.preemptions > 0
        assert found.tokens == platform.oracle(requests).tokens

    def test_shared_prompts_are_folded(self, platform: PlatformUnderTest) -> None:
        requests = platform.prompts(6, seed=2, shared=85)
        assert platform.run(requests, {"chunk": 11}).tokens == platform.oracle(requests).tokens

    def test_a_lost_worker_s_successor_goes_on(self, platform: PlatformUnderTest) -> None:
        requests = platform.prompts(4, seed=3)
        found = platform.run(requests, None, lambda rig, number: rig.kill_worker() if number in (2, 9) else None)
        assert found.tokens == platform.oracle(requests).tokens

    def test_not_a_number_ends_one_sequence_only(self, platform: PlatformUnderTest) -> None:
        requests = {"well": [1, 2, 3, 4, 5, 6], "broken": [1, 2, POISON, 4, 5, 6, 7], "other": [9, 8, 7]}
        found = platform.poisoned().run(requests, {"chunk": 3})
        assert found.ended["broken"].reason is FinishReason.ERROR
        assert "NaN" in found.ended["broken"].detail
        del requests["broken"]
        assert {name: found.tokens[name] for name in requests} == platform.oracle(requests).tokens

    @pytest.mark.parametrize("kind", SCALINGS)
    def test_all_traits_at_once(self, platform: PlatformUnderTest, kind: str) -> None:
        """All traits at once, unless `load` refuses the model by name."""
        made = replace(platform, config=all_traits(platform.config, kind))
        try:
            made.model()
        except ModelUnsupported as error:
            pytest.skip(str(error))
        requests = made.prompts(2 if platform.slow else 4, seed=13)

        def preempt(rig: StepRig, number: int) -> None:
            if number in (3, 8):
                rig.dispatch(PreemptSome(1))

        assert made.run(requests, {"chunk": 9}, preempt).tokens == made.oracle(requests).tokens

    # Sampling

    @pytest.mark.parametrize(
        "sampling", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}], ids=["temperature", "top_p", "top_k and min_p"]
    )
    def test_draws_are_those_of_the_oracle(self, platform: PlatformUnderTest, sampling: dict[str, Any]) -> None:
        """Logits differ by rounding, so a single draw at an edge may differ; hundreds of equal draws are no chance."""
        requests = platform.prompts(8, seed=4)
        asked = {"temperature": 0.8, "seed": 11, **sampling}
        found, wanted = platform.run(requests, **asked).tokens, platform.oracle(requests, **asked).tokens
        assert sum(found[name] == wanted[name] for name in requests) >= len(requests) - 1

    def test_what_adjusts_logits(self, platform: PlatformUnderTest) -> None:
        """Settings of some requests of a batch do not affect the others."""
        requests = platform.prompts(6, seed=5)
        each = {
            "p0": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
            "p1": {"logit_bias": ((7, 5.0), (9, -5.0))},
            "p2": {
                "bad_words": tuple((token,) for token in range(40)),
                "min_tokens": 3,
                "stop_token_ids": tuple(range(40, 70)),
            },
            "p3": {"thinking": Thinking(end=5, budget=2, is_open=True)},
        }
        found = platform.run(requests, each=each)
        assert found.tokens == platform.oracle(requests, each=each).tokens
        assert found.tokens["p3"][2] == 5

    def test_bad_words_of_several_tokens(self, platform: PlatformUnderTest) -> None:
        """Rules that depend on the previous token hold even if the host does not have it yet."""
        requests = platform.prompts(3, seed=6)
        free = platform.oracle(requests).tokens["p0"]
        asked: dict[str, Any] = {"bad_words": ((free[0], free[1]), tuple(free[1:4]))}
        found = platform.run(requests, **asked).tokens
        assert found == platform.oracle(requests, **asked).tokens
        assert found["p0"][:2] != free[:2]

    @pytest.mark.parametrize("chunk", [5, None])
    def test_log_probabilities_of_outputs_and_prompts(self, platform: PlatformUnderTest, chunk: int | None) -> None:
        requests = platform.prompts(4, seed=7)
        found = platform.run(requests, {"chunk": chunk}, logprobs=3, prompt_logprobs=2)
        wanted = platform.oracle(requests, logprobs=3, prompt_logprobs=2)
        assert found.tokens == wanted.tokens
        for name in requests:
            assert sorted(found.logprobs[name]) == sorted(wanted.logprobs[name])
            for position, logprob in wanted.logprobs[name].items():
                ours = found.logprobs[name][position]
                assert (ours.token, ours.rank) == (logprob.token, logprob.rank)
                assert ours.logprob == pytest.approx(logprob.logprob, abs=1e-3)

    # Structured output

    @pytest.mark.parametrize(
        "sampling", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 5, "frequency_penalty": 0.3}], ids=["greedy", "random"]
    )
    def test_grammars(self, platform: PlatformUnderTest, sampling: dict[str, Any]) -> None:
        requests = platform.prompts(5, seed=8)
        asked = {
            **sampling,
            "max_tokens": 24,
            "stop_token_ids": (END,),
            "each": {n: {"grammar": g} for n, g in GRAMMARS.items()},
        }
        found = platform.run(requests, **asked)
        wanted = platform.oracle(requests, **asked)
        assert sum(found.tokens[name] == wanted.tokens[name] for name in requests) >= len(requests) - bool(sampling)
        for name in GRAMMARS:
            if found.ended[name].reason is FinishReason.STOP:
                assert _fits(name, b"".join(TOKENS[token] for token in found.tokens[name] if token != END).decode())
        assert sum(found.ended[name].reason is FinishReason.STOP for name in GRAMMARS) >= 2

    def test_preempted_grammars_and_lost_workers(self, platform: PlatformUnderTest) -> None:
        requests = platform.prompts(5, seed=9)
        asked = {"max_tokens": 16, "stop_token_ids": (END,), "each": {name: {"grammar": one} for name, one in GRAMMARS.items()}}

        def disturb(rig: StepRig, number: int) -> None:
            if number == 7:
                rig.kill_worker()
            elif number in (3, 11, 15):
                rig.dispatch(PreemptSome(2))

        found = platform.run(requests, {"chunk": 7}, disturb, **asked)
        assert found.preemptions > 0
        assert found.tokens == platform.oracle(requests, **asked).tokens

    def test_a_grammar_that_leaves_nothing_fails_alone(self, platform: PlatformUnderTest) -> None:
        requests = {"bad": [3], "good": [4]}
        abc = Grammar("regex", "abc", ends=(END,))
        each = {"bad": {"bad_words": ((TOKENS.index(b"b"),),)}}
        found = platform.run(requests, grammar=abc, stop_token_ids=(END,), each=each)
        assert found.ended["bad"].reason is FinishReason.ERROR
        assert b"".join(TOKENS[token] for token in found.tokens["good"] if token != END) == b"abc"

    # Embeddings

    @pytest.mark.parametrize("pooling", ["mean", "last"])
    def test_embeddings(self, platform: PlatformUnderTest, pooling: str) -> None:
        """Embeddings beside generating requests: in one chunk, in several, and with chunks of one token."""
        requests = platform.prompts(4, seed=10)
        requests["p0"] = requests["p0"][:1]
        each = {name: {"pooling": pooling, "max_tokens": 1} for name in list(requests)[:3]}
        wanted = platform.oracle(requests, each=each)
        assert list(wanted.vectors) == list(each)
        of_chunks = []
        for chunk in (None, 4) if not platform.slow else (4,):
            found = platform.run(requests, {"chunk": chunk}, each=each)
            assert found.tokens == wanted.tokens
            for name, vector in wanted.vectors.items():
                numbers = np.frombuffer(found.vectors[name], "<f4")
                assert abs(np.linalg.norm(numbers) - 1.0) < 1e-6
                np.testing.assert_allclose(numbers, np.frombuffer(vector, "<f4"), atol=2e-5)
            of_chunks.append(found.vectors)
        if platform.same_bits:
            assert of_chunks[0] == of_chunks[1]

    @pytest.mark.parametrize("pooling", ["mean", "last"])
    def test_embeddings_of_preempted_prompts(self, platform: PlatformUnderTest, pooling: str) -> None:
        requests = platform.prompts(4, seed=11)
        wanted = platform.oracle(requests, pooling=pooling, max_tokens=1).vectors

        def preempt(rig: StepRig, number: int) -> None:
            if number in (1, 3, 6):
                rig.dispatch(PreemptSome(1))

        found = platform.run(requests, {"chunk": 4, "slots": 2}, preempt, pooling=pooling, max_tokens=1)
        assert found.preemptions > 0
        for name, vector in wanted.items():
            np.testing.assert_allclose(np.frombuffer(found.vectors[name], "<f4"), np.frombuffer(vector, "<f4"), atol=2e-5)

    def test_a_prompt_that_is_not_finite_has_no_vector(self, platform: PlatformUnderTest) -> None:
        """Later chunks of the failed prompt may have been launched before."""
        requests = {"well": [1, 2, 3, 4, 5, 6], "broken": [POISON, 2, 3, 4, 5, 6, 7, 8]}
        found = platform.poisoned().run(requests, {"chunk": 2}, pooling="mean", max_tokens=1)
        assert found.ended["broken"].reason is FinishReason.ERROR
        assert list(found.vectors) == ["well"]

    # Bits

    @pytest.mark.parametrize("disturbed", [False, True])
    def test_the_same_bits_in_any_company(self, platform: PlatformUnderTest, disturbed: bool) -> None:
        """Equal to the last bit of the log-probabilities, if the platform promises it."""
        if not platform.same_bits:
            pytest.skip("promised by native kernels, and on a GPU by --deterministic")
        requests = platform.prompts(6, seed=12)

        def preempt(rig: StepRig, number: int) -> None:
            if disturbed and number % 5 == 4:
                rig.dispatch(PreemptSome(1))

        together = platform.run(requests, {"chunk": 13}, preempt, logprobs=1)
        assert (together.preemptions > 0) == disturbed
        for name, prompt in requests.items():
            alone = platform.run({name: prompt}, logprobs=1)
            assert alone.tokens[name] == together.tokens[name]
            assert alone.logprobs[name] == together.logprobs[name]


def _hardware(platform: PlatformUnderTest) -> Platform:
    if platform.hardware is None:
        pytest.skip("an executor alone")
    return platform.hardware
