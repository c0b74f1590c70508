"""Encoders through the real core and the real runner: what the vectors are, and that nothing on the way changes them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from rig import Rig, RigModel
from tiny_encoders import write_encoder

from baton.config import WorkerConfig
from baton.core.events import EvictSome, PreemptSome
from baton.errors import InvalidConfig, ModelUnsupported
from baton.models.open import open_encoder
from baton.protocol.request import FinishReason
from baton.worker.encoders import encoder_kind, encoder_settings, load_encoder
from baton.worker.platforms.cpu import CpuPlatform
from baton.worker.profile import largest_step

PROMPTS = {f"p{count}": [2, *(random.Random(count).randrange(5, 97) for _ in range(count)), 3] for count in (1, 5, 6, 13, 40)}


def loaded(folder, **settings) -> RigModel:
    opened = open_encoder(folder)
    config = WorkerConfig(threads=1, **settings)
    return RigModel(opened.config, load_encoder(CpuPlatform(), opened, config, None))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    return write_encoder(folder, "modernbert"), loaded(folder)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    return write_encoder(folder, "xlm-roberta-reranker"), loaded(folder)


def answers(rig: Rig) -> dict[str, np.ndarray]:
    found = {}
    for (name, _), rows in rig.logprobs.items():
        given = {row.embedding for row in rows if row.embedding}
        assert len(given) == 1
        found[name] = np.frombuffer(given.pop(), "<f4")
    assert all(end.reason is FinishReason.LENGTH for end in rig.ended.values())
    assert set(found) == {name for name, _ in rig.ended}
    return found


def submit_all(rig: Rig, **sampling) -> None:
    for name, prompt in PROMPTS.items():
        rig.submit(name, prompt, max_tokens=1, **sampling)


def pooled_by_sentence_transformers(oracle, prompt: list[int], pooling: str) -> np.ndarray:
    """The arithmetic of its Transformer, Pooling and Normalize modules, with a mask of ones."""
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    with torch.inference_mode():
        states = oracle.base_model(input_ids=torch.tensor([prompt]), attention_mask=mask)[0]
        weights = mask[..., None].float()
        vector = {
            "cls": states[:, 0],
            "mean": (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9),
            "last": states[torch.arange(1), mask.sum(1) - 1],
        }[pooling]
        return torch.nn.functional.normalize(vector, p=2, dim=1)[0].numpy()


def close_to(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=atol, rtol=0)


def alone(model: RigModel, **sampling) -> dict[str, np.ndarray]:
    found = {}
    for name, prompt in PROMPTS.items():
        rig = Rig(model, steps_in_flight=1)
        rig.submit(name, prompt, max_tokens=1, **sampling)
        rig.run()
        found |= answers(rig)
    return found


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_vectors_are_those_of_sentence_transformers(embedder, pooling):
    oracle, model = embedder
    expected = {name: pooled_by_sentence_transformers(oracle, prompt, pooling) for name, prompt in PROMPTS.items()}
    close_to(alone(model, pooling=pooling), expected, atol=1e-4)


def test_vectors_without_a_normalize_module_keep_their_length(tmp_path):
    oracle = write_encoder(tmp_path, "bert", modules=("Transformer", "Pooling"))
    with torch.inference_mode():
        states = oracle.base_model(input_ids=torch.tensor([PROMPTS["p13"]]))[0][0]
    found = alone(loaded(tmp_path), pooling="mean")["p13"]
    np.testing.assert_allclose(found, states.mean(0).numpy(), atol=1e-4)
    assert abs(np.linalg.norm(found) - 1.0) > 0.01


@pytest.mark.parametrize("chunk", [1, 3, 16, None])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_and_company_change_nothing(embedder, pooling, chunk):
    rig = Rig(embedder[1], chunk=chunk)
    submit_all(rig, pooling=pooling)
    rig.run()
    close_to(answers(rig), alone(embedder[1], pooling=pooling))


@pytest.mark.parametrize("seed", range(3))
def test_preemptions_and_evictions_change_nothing(embedder, seed):
    rng = random.Random(seed)
    rig = Rig(embedder[1], chunk=3, blocks=20, slots=3)
    submit_all(rig, pooling="mean")
    rig.run(
        lambda step: rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(2), EvictSome(4)])) if rng.random() < 0.3 else None
    )
    assert rig.instance.stats.preemptions > 0
    close_to(answers(rig), alone(embedder[1], pooling="mean"))


def test_a_lost_worker_changes_nothing(embedder):
    rig = Rig(embedder[1], chunk=4)
    submit_all(rig, pooling="mean")
    rig.run(lambda step: rig.kill_worker() if step in (3, 9) else None)
    assert rig.instance.stats.worker_losses == 2
    close_to(answers(rig), alone(embedder[1], pooling="mean"))


def test_a_cached_prefix_changes_nothing(embedder):
    """Blocks hold nothing: the prompt is computed as a whole, whatever the scheduler takes for computed."""
    rig = Rig(embedder[1])
    for name in ("first", "again"):
        rig.submit(name, PROMPTS["p40"], max_tokens=1, pooling="last")
        rig.run()
    found = answers(rig)
    assert rig.ended["again", 0].cached_tokens > 0
    np.testing.assert_array_equal(found["first"], found["again"])


def test_logits_of_classes_are_those_of_transformers(reranker):
    oracle, model = reranker
    rig = Rig(model, chunk=7)
    submit_all(rig, pooling="cls", label_ids=(0,))
    rig.run()
    for name, logits in answers(rig).items():
        with torch.inference_mode():
            expected = oracle(input_ids=torch.tensor([PROMPTS[name]])).logits[0]
        np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)


def test_what_an_encoder_cannot_do_fails_alone(embedder, reranker):
    rig = Rig(embedder[1])
    rig.submit("text", PROMPTS["p5"], max_tokens=4)
    rig.submit("class", PROMPTS["p5"], max_tokens=1, pooling="cls", label_ids=(0,))
    rig.submit("vector", PROMPTS["p5"], max_tokens=1, pooling="mean")
    rig.run()
    reasons = {name: (end.reason, end.detail) for (name, _), end in rig.ended.items()}
    assert reasons["text"][0] is FinishReason.ERROR
    assert "generates no text" in reasons["text"][1]
    assert "no class" in reasons["class"][1]
    assert reasons["vector"][0] is FinishReason.LENGTH


def test_a_prompt_beyond_the_positions_fails_alone(reranker):
    """The front cuts or refuses it. Here an index out of range would end the worker, and on a GPU its whole process."""
    rig = Rig(reranker[1])
    rig.submit("long", [7] * 63, max_tokens=1, pooling="mean")
    rig.submit("fits", [7] * 62, max_tokens=1, pooling="mean")
    rig.run()
    assert (rig.ended["long", 0].reason, rig.ended["fits", 0].reason) == (FinishReason.ERROR, FinishReason.LENGTH)


def test_states_that_are_not_finite_fail_alone(tmp_path):
    oracle = write_encoder(tmp_path, "bert")
    with torch.no_grad():
        oracle.embeddings.word_embeddings.weight[50] = float("nan")
    oracle.save_pretrained(tmp_path)
    rig = Rig(loaded(tmp_path))
    rig.submit("bad", [2, 50, 3], max_tokens=1, pooling="mean")
    rig.submit("good", [2, 51, 3], max_tokens=1, pooling="mean")
    rig.run()
    assert rig.ended["bad", 0].reason is FinishReason.ERROR
    assert rig.ended["good", 0].reason is FinishReason.LENGTH


def test_prompts_that_end_together_are_computed_in_runs(tmp_path, monkeypatch):
    write_encoder(tmp_path, "bert")
    model = loaded(tmp_path, tokens_per_step=50)
    seen = []
    rig = Rig(model, chunk=None)
    encoder = rig.runner.executor._encoder
    forward = encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda ids, lengths: seen.append(list(lengths)) or forward(ids, lengths))
    submit_all(rig, pooling="mean")
    rig.run()
    assert all(sum(lengths) <= 50 or len(lengths) == 1 for lengths in seen)
    assert sorted(length for lengths in seen for length in lengths) == [3, 7, 8, 15, 42]
    close_to(answers(rig), alone(model, pooling="mean"))


def test_the_largest_step_of_a_memory_profile_runs(embedder):
    """Every sequence that is due is computed, pooled or not."""
    rig = Rig(embedder[1], blocks=64, block_size=16)
    plan = largest_step(WorkerConfig(slots=4, tokens_per_step=64, block_size=16), 64)
    result = rig.runner.execute(plan)
    assert len(result.failures) == 4


def test_settings_that_are_not_for_encoders():
    assert encoder_settings(WorkerConfig(context_tokens_max=512), 512).context_tokens_max == 513
    assert encoder_settings(WorkerConfig(), 512).quantization == "none"
    for settings, words in (
        ({"quantization": "int8"}, "quantization"),
        ({"compute": "native"}, "native"),
        ({"context_tokens_max": 513}, "512"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            encoder_settings(replace(WorkerConfig(), **settings), 512)
    other = CpuPlatform()
    other.name = "xpu"
    with pytest.raises(ModelUnsupported, match="xpu"):
        encoder_kind(other)
