"""--device: which platform, what "auto" means there, and errors that say what to do."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.models.shapes import SHAPES
from baton.worker.build import build_worker, layout_of
from baton.worker.platforms import choose as choosing
from baton.worker.platforms import visible
from baton.worker.platforms.choose import ATTACHER_GIB, choose

FOLDER = Path("/")
GGUF = Path(__file__)
"""A file, as a GGUF is."""


class FakeCuda:
    name = "cuda"

    def __init__(self, share_of_others: float) -> None:
        self.share_of_others = share_of_others


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, up to where it would be used. The real platform imports Triton, which has no wheel for ARM."""
    platform = ModuleType("baton.worker.platforms.cuda")
    platform.CudaPlatform = FakeCuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, platform.__name__, platform)
    monkeypatch.setattr(visible, "GPU_FILES", ("/",))
    monkeypatch.setattr(choosing, "missing_for_cuda", lambda: "")


def test_without_a_driver_auto_is_the_cpu_and_torch_is_not_asked(monkeypatch):
    monkeypatch.setattr(visible, "GPU_FILES", ("/no/such/file",))
    monkeypatch.setattr(choosing, "missing_for_cuda", lambda: pytest.fail("torch was asked"))
    platform, config = choose(WorkerConfig(), FOLDER)
    assert (platform.name, config.device, config.dtype, config.kv_memory_gib) == ("cpu", "cpu", "float32", 2.0)


def test_a_gpu_that_torch_sees_is_taken_and_the_log_says_why(gpu, caplog):
    with caplog.at_level(logging.INFO):
        platform, config = choose(WorkerConfig(), FOLDER)
    assert (platform.name, config.device, config.dtype) == ("cuda", "cuda", "bfloat16")
    assert (config.memory_utilization, config.quantization) == (0.9, "none")
    assert "device cuda: torch sees an NVIDIA GPU" in caplog.text


@pytest.mark.parametrize(
    ("settings", "share", "of_others"),
    [
        ({"device_sharers": 3}, 0.3, 0.0),
        ({"device_sharers": 3, "device_place": 2}, 0.9, 0.6),
        ({"device_sharers": 2, "memory_utilization": 0.8}, 0.4, 0.0),
        ({"device_sharers": 2, "memory_utilization": 0.8, "device_place": 1}, 0.8, 0.4),
        ({"device_sharers": 2, "blocks": 7, "device_place": 1}, None, 0.0),
        ({"device_sharers": 2, "kv_memory_gib": 3.0}, None, 0.0),
    ],
)
def test_instances_on_one_gpu_divide_its_memory(gpu, settings, share, of_others):
    platform, config = choose(WorkerConfig(device="cuda", **settings), FOLDER)
    assert (config.memory_utilization, platform.share_of_others) == (pytest.approx(share), pytest.approx(of_others))


@pytest.mark.parametrize(("pool", "reserved"), [("private", 0.0), ("announced", ATTACHER_GIB), ("attached", ATTACHER_GIB)])
def test_a_gpu_keeps_memory_for_the_cache_service_and_none_for_the_host_tier(gpu, pool, reserved):
    """The host tier is main memory: it was taken from the GPU's KV pool."""
    _, config = choose(WorkerConfig(device="cuda", memory_reserved_gib=64.0, pool=pool), FOLDER)
    assert config.memory_reserved_gib == reserved


@pytest.mark.parametrize(
    ("given", "index", "seen"),
    [(None, 0, "0"), (None, 3, "3"), ("2,5", 1, "5"), ("GPU-a, GPU-b", 1, "GPU-b"), ("", 0, ""), ("7", 1, "")],
)
def test_a_process_sees_its_own_gpu_only(given, index, seen):
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    visible.use_only(index, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": seen}


def test_without_a_driver_no_gpu_is_visible(monkeypatch):
    monkeypatch.setattr(visible, "GPU_FILES", ("/no/such/file",))
    monkeypatch.setattr(visible.cuda_driver, "device_count", lambda: pytest.fail("the driver was asked"))
    assert visible.visible_gpus() == 0
    monkeypatch.setattr(visible, "GPU_FILES", ("/",))
    monkeypatch.setattr(visible.cuda_driver, "device_count", lambda: 3)
    assert visible.visible_gpus() == 3


def test_a_gguf_file_stays_on_the_cpu(gpu, caplog):
    with caplog.at_level(logging.INFO):
        platform, _ = choose(WorkerConfig(), GGUF)
    assert platform.name == "cpu"
    assert "a GGUF file is computed on a CPU unless --device cuda is given" in caplog.text
    assert choose(WorkerConfig(device="cuda"), GGUF)[0].name == "cuda"


def test_a_driver_without_a_torch_for_it_is_said_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(visible, "GPU_FILES", ("/",))
    monkeypatch.setattr(choosing, "missing_for_cuda", lambda: "torch 2.9 was built without CUDA")
    with caplog.at_level(logging.INFO):
        assert choose(WorkerConfig(), FOLDER)[0].name == "cpu"
    assert "device cpu: torch 2.9 was built without CUDA" in caplog.text


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("torch is not installed: pip install torch", "pip install torch; or take --device cpu"),
        ("torch 2.9 sees no NVIDIA GPU: check nvidia-smi", "--device cuda: torch 2.9 sees no NVIDIA GPU"),
    ],
)
def test_cuda_without_what_it_needs_is_refused_with_what_to_do(monkeypatch, missing, words):
    monkeypatch.setattr(choosing, "missing_for_cuda", lambda: missing)
    with pytest.raises(InvalidConfig, match=words):
        choose(WorkerConfig(device="cuda"), FOLDER)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda", "quantization": "int8"}, "--quantization int8 is for CPUs"),
        ({"device": "cuda", "compute": "native"}, "--compute native is for CPUs"),
        ({"device": "cuda", "kv_dtype": "fp8", "compute": "torch"}, "fp8 needs our kernels"),
        ({"device": "cuda", "quantization": "fp8", "compute": "torch"}, "fp8 needs our kernels"),
        ({"device": "cpu", "quantization": "fp8"}, "--quantization fp8 and --kv-cache-dtype fp8 are for GPUs"),
        ({"device": "cpu", "kv_dtype": "fp8"}, "--quantization fp8 and --kv-cache-dtype fp8 are for GPUs"),
        ({"device": "cuda", "kv_dtype": "int8"}, "--kv-cache-dtype int8: on a GPU the KV cache is fp8 or as activations are"),
        ({"device": "cpu", "dtype": "bfloat16"}, "--dtype bfloat16 is for GPUs"),
    ],
)
def test_settings_of_the_other_device_are_refused(gpu, settings, words):
    with pytest.raises(InvalidConfig, match=words):
        choose(WorkerConfig(**settings), FOLDER)


@pytest.mark.parametrize("settings", [{"blocks": 7}, {"memory_utilization": 0.5}, {"kv_memory_gib": 3.0}])
def test_a_pool_whose_size_is_given_is_not_measured(gpu, settings):
    _, config = choose(WorkerConfig(**settings), FOLDER)
    assert config.memory_utilization == settings.get("memory_utilization")


def test_this_machine_says_what_is_missing():
    """Whatever it is: a GPU machine runs the rest of this in tests/gpu."""
    missing = choosing.missing_for_cuda()
    if not missing:
        pytest.skip("nothing is missing here")
    with pytest.raises(InvalidConfig, match="or take --device cpu"):
        choose(WorkerConfig(device="cuda"), FOLDER)


# Random weights


def test_dummy_weights_of_a_named_shape(smollm2_path):
    config = WorkerConfig(model=str(smollm2_path), load_format="dummy", model_shape="llama-3-8b", device="cpu")
    layout = layout_of(config)
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (32, 8, 128)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_shape": "llama-3-8b"}, "give --load-format dummy too"),
        ({"load_format": "dummy", "model_shape": "llama-9"}, "no such shape; there are llama-3-8b, "),
    ],
)
def test_shapes_that_make_no_sense_are_refused(smollm2_path, settings, words):
    with pytest.raises(InvalidConfig, match=words):
        build_worker(WorkerConfig(model=str(smollm2_path), **settings))


def test_shapes_are_as_large_as_their_names_say():
    from math import prod

    from baton.models.parameters import expected_shapes

    billions = {name: sum(map(prod, expected_shapes(shape).values())) / 1e9 for name, shape in SHAPES.items()}
    assert {name: round(size, 1) for name, size in billions.items()} == {
        "llama-3-8b": 8.0,
        "llama-3.1-8b": 8.0,
        "llama-3.1-70b": 70.6,
        "llama-3.2-1b": 1.2,
        "llama-3.2-3b": 3.2,
        "qwen3-0.6b": 0.6,
        "qwen3-4b": 4.0,
        "qwen3-8b": 8.2,
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235.1,
    }
