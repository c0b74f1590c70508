"""Digests of what the GPU's kernels make of the small model of tests/native/golden_model.py: logits, and the KV that is kept.

python tests/gpu/golden_on_gpu.py              prints the digests of this GPU
python tests/gpu/golden_on_gpu.py FILE         adds those that changed to FILE (golden_cuda.json), under the next number
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "native"))
from golden_model import BLOCK, CONFIG, LONG, SHORT, GoldenWeights, Part, numbers_without_bits, with_digests, words

from baton.config import WorkerConfig
from baton.models.config import Experts, ModelConfig, Traits
from baton.models.open import OpenedModel
from baton.models.tensor_types import F32
from baton.worker.kv_layout import kv_layout

if TYPE_CHECKING:
    from baton.worker.cuda.step_inputs import StepBatch

__all__ = ["numbers_without_bits"]  # for the test, beside what is defined here

GOLDEN = Path(__file__).with_name("golden_cuda.json")
MIXTURE = Experts(count=8, per_token=3, inner_size=256, normalised=True)
EXPERTS = replace(CONFIG, architecture="qwen3_moe", traits=Traits(qk_norm=True), experts=MIXTURE)
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "bfloat16": (CONFIG, {}),
    "fp8 keys": (CONFIG, {"kv_dtype": "fp8"}),
    "fp8": (CONFIG, {"quantization": "fp8"}),
    "experts": (EXPERTS, {}),
    "experts, fp8": (EXPERTS, {"quantization": "fp8"}),
    "deterministic": (CONFIG, {"deterministic": True}),
    "float32": (CONFIG, {"dtype": "float32"}),
}
SLOTS, ROWS = 8, 512


def digest_of(config: ModelConfig, settings: dict[str, Any]) -> str:
    """Prompts, chunks, single tokens, several sequences, long contexts: all logits of them, and the blocks that they leave."""
    import torch

    from baton.worker.attention.pool_tensors import device_tensor
    from baton.worker.platforms.cuda import CudaPlatform

    platform = CudaPlatform()
    given = {"dtype": "bfloat16", "quantization": "none", **settings}
    worker = WorkerConfig(device="cuda", block_size=BLOCK, slots=SLOTS, tokens_per_step=ROWS, **given)
    loaded = platform.load(OpenedModel(Path(), config, GoldenWeights(config, (F32,))), worker)
    width = -(-config.context_tokens_max // BLOCK)
    pool = platform.create_pool(kv_layout(config, BLOCK, loaded.kv), SLOTS * width)
    device_tensor(pool).view(torch.uint8).zero_()
    executor = loaded.with_pool(pool, config.context_tokens_max)
    steps, digest = executor._steps, sha256()  # type: ignore[attr-defined]
    tables = np.arange(SLOTS * width)[::-1].reshape(SLOTS, width)
    slots, places = np.divmod(np.arange(SLOTS * width), width)
    with torch.inference_mode():
        steps.write_tables(slots, places, tables.reshape(-1))
        for parts in [*SHORT, *([(slot + 4, at, count) for slot, at, count in part] for part in LONG)]:
            batch = step_of(parts, config.vocab_size)
            steps.launch(batch).done.synchronize()
            logits = steps.step.logits(len(parts))
            assert torch.isfinite(logits).all()
            digest.update(logits.cpu().numpy().tobytes())
    digest.update(device_tensor(pool).view(torch.uint8).cpu().numpy().tobytes())
    executor.close()
    pool.close()
    return digest.hexdigest()[:24]


def step_of(parts: list[Part], vocabulary: int) -> StepBatch:
    from baton.worker.cuda.step_inputs import StepBatch

    token_ids = np.concatenate([words(f"tokens {slot}", at + count)[at:] % np.uint64(vocabulary) for slot, at, count in parts])
    return StepBatch(
        token_ids.astype(np.int32),
        np.array([slot for slot, _, _ in parts], np.int64),
        np.cumsum([0, *(count for _, _, count in parts)]),
        np.array([at for _, at, _ in parts], np.int64),
        np.ones(len(parts), np.bool_),
        np.zeros(len(parts), np.int64),
    )


def key() -> str:
    import torch

    from baton.worker.cuda.libraries import library_versions

    return f"{torch.cuda.get_device_name()} {library_versions()}"


def digests() -> Iterator[tuple[str, str]]:
    """As they come. A process for each case: most of the time is spent in compilers."""
    children = {
        name: subprocess.Popen([sys.executable, __file__, "--case", name], stdout=subprocess.PIPE, text=True) for name in CASES
    }
    for name, child in children.items():
        found = child.communicate(timeout=600)[0].split()
        if child.returncode == 0:
            yield name, found[-1]


def written(path: Path = GOLDEN) -> dict[str, list[dict[str, Any]]]:
    """Of each GPU with its libraries every arithmetic that it had, the last one last."""
    return json.loads(path.read_text()) if path.exists() else {}


def with_some_digests(entries: list[dict[str, Any]], found: dict[str, str]) -> list[dict[str, Any]]:
    """With those that are there so far; the others are as they were, unless bits have changed."""
    made = with_digests(entries, found)
    if entries and len(made) == len(entries):
        others = {name: value for name, value in entries[-1]["digests"].items() if name in CASES}
        made[-1] = {**made[-1], "digests": {**others, **found}}
    return made


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        print(digest_of(*CASES[sys.argv[2]]))
        return
    found: dict[str, str] = {}
    before = written()
    for name, value in digests():
        found[name] = value
        print(key(), name, value, flush=True)
        for path in map(Path, sys.argv[1:]):  # again after each: it may be all that there is time for
            entries = {**before, key(): with_some_digests(before.get(key(), []), found)}
            path.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
