"""Once the weights are loaded, nothing that happens to their files changes an answer or ends the worker."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "chaos"))
sys.path.append(str(Path(__file__).parent.parent / "models"))
from chaos_model import CONFIG, make_model
from rig import generate, load_path
from safetensors.numpy import load_file

from baton.config import WorkerConfig
from baton.worker.build import build_worker

try:
    import gguf
except ImportError:  # what GGUF files are made with
    gguf = None

FORMS = ("folder", "gguf") if gguf else ("folder",)
MAPS = Path("/proc/self/maps")
WAYS: dict[str, dict[str, str]] = {
    "native, float32 as stored": {"compute": "native", "quantization": "none"},
    "native, 8 bits": {"compute": "native", "quantization": "int8"},
    "torch": {"compute": "torch", "quantization": "none", "kv_dtype": "float32"},
}


def model_folder(folder: Path) -> Path:
    return make_model(folder, hidden_size=64)


def gguf_file(folder: Path) -> Path:
    """The same model with blocks of 8 bits, as most GGUF files have their embedding."""
    from gguf_files import gguf_name

    weights = load_file(model_folder(folder) / "model.safetensors")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "block_count": CONFIG["num_hidden_layers"],
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": 64,
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "attention.key_length": CONFIG["head_dim"],
        "attention.value_length": CONFIG["head_dim"],
        "rope.dimension_count": CONFIG["head_dim"],
        "vocab_size": CONFIG["vocab_size"],
    }
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", CONFIG["rms_norm_eps"])
    for name, values in weights.items():
        kind = gguf.GGMLQuantizationType["Q8_0" if name.endswith("embed_tokens.weight") else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make(form: str, folder: Path) -> tuple[Path, Path]:
    """What is to be loaded, and the file that its weights are in."""
    path = gguf_file(folder) if form == "gguf" else model_folder(folder)
    return path, path if form == "gguf" else path / "model.safetensors"


def overwrite(file: Path) -> None:
    """In place: as cp and rsync --inplace do."""
    with file.open("r+b") as out:
        out.write(b"\0" * file.stat().st_size)


def cut_short(file: Path) -> None:
    os.truncate(file, 100)


def check_answers_stay(form: str, folder: Path, way: str, damage: Callable[[Path], None]) -> None:
    path, file = make(form, folder)
    model = load_path(path, **WAYS[way])
    prompts = {"a": [5, 3, 60], "b": [11, 70, 200, 31]}
    before = generate(model, prompts, max_tokens=12)
    damage(file)
    assert before
    assert generate(model, prompts, max_tokens=12) == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_overwritten_changes_no_answer(tmp_path, form, way):
    check_answers_stay(form, tmp_path, way, overwrite)


def test_a_file_that_is_cut_short_neither_changes_an_answer_nor_ends_the_process(tmp_path):
    """In a process of its own: reading a mapped file beyond its end is a signal."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stdout[-300:]} {done.stderr[-1500:]}"


def check_nothing_is_mapped(folder: Path, model: Path, **settings: str) -> None:
    """`folder`: no file of it stays mapped."""
    built = build_worker(WorkerConfig(model=str(model), blocks=8, slots=2, threads=1, **settings))  # type: ignore[arg-type]
    gc.collect()
    mapped = [line for line in MAPS.read_text().splitlines() if str(folder) in line]
    built.runner.close()
    assert mapped == []


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say which files a process has mapped")
@pytest.mark.parametrize("way", WAYS)
def test_no_file_of_the_model_stays_mapped(tmp_path, way):
    check_nothing_is_mapped(tmp_path, model_folder(tmp_path / "model"), **WAYS[way])


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say which files a process has mapped")
@pytest.mark.parametrize("way", WAYS)
def test_no_file_of_a_draft_model_stays_mapped(tmp_path, way):
    draft = model_folder(tmp_path / "draft")
    check_nothing_is_mapped(tmp_path, model_folder(tmp_path / "model"), speculate=f"draft:{draft}", **WAYS[way])


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say which files a process has mapped")
@pytest.mark.parametrize("case", ["bert-reranker", "modernbert"])
def test_no_file_of_an_encoder_stays_mapped(tmp_path, case):
    encoders = pytest.importorskip("tiny_encoders", reason="the models of encoders come from transformers")
    encoders.write_encoder(tmp_path, case)
    check_nothing_is_mapped(tmp_path, tmp_path)


if __name__ == "__main__":
    for form in FORMS:
        for number, way in enumerate(WAYS):
            print(form, way, flush=True)
            check_answers_stay(form, Path(sys.argv[1], f"{form}-{number}"), way, cut_short)
