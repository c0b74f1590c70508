"""What the front knows of the model's files: Ollama's clients list size and digest."""

from __future__ import annotations

from pathlib import Path

from baton.config import ServeConfig
from baton.protocol.control import InstanceReady
from baton.runtime.front.process import served_model, weights_bytes


def ready(weights: str) -> InstanceReady:
    return InstanceReady(
        blocks=1, block_size=16, slots=1, context_tokens=64, vocab_size=10, identity=b"i", identity_parts={"weights": weights}
    )


def test_the_size_is_that_of_the_weight_files(tmp_path: Path):
    for name, size in (("a.safetensors", 300), ("b.safetensors", 70), ("tokenizer.json", 9)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "one.gguf").write_bytes(bytes(55))
    assert weights_bytes(tmp_path) == 370
    assert weights_bytes(tmp_path / "one.gguf") == 55
    assert weights_bytes(tmp_path / "nothing") == 0


def test_the_digest_is_of_the_weights_alone(tmp_path: Path):
    (tmp_path / "one.gguf").write_bytes(bytes(55))
    config = ServeConfig(model=str(tmp_path / "one.gguf"))
    model = served_model(config, ready("aa"))
    assert (model.weights, model.weights_bytes) == ("aa", 55)
