"""Digests of the operations that models/decoder.py asks of torch, for the small model of tests/native/golden_model.py.

    python tests/worker/torch_golden.py            prints them
    python tests/worker/torch_golden.py --write    adds those that changed to torch_golden.json, under the next number

The bits of a product in torch differ by processor, so digests of logits would hold on one machine only. The operations with
their order, operands, shapes and constants are the same on every machine. Views compute nothing, so their names do not count:
a view is described by its memory. A digest belongs to a minor version of torch, which may split operations differently.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[1] / "native"))
from golden_model import BLOCK, CONFIG, MIXTURES, OSS_ROPE, OSS_TRAITS, SHORT, Entry, GoldenWeights, batch_of, with_digests

from baton.config import WorkerConfig
from baton.kvpool.pool import KVPool
from baton.models.open import OpenedModel
from baton.models.tensor_types import F32, MXFP4, Q4_K, TensorType
from baton.worker.arithmetic import TORCH
from baton.worker.forward.torch_forward import TorchForward, load_torch
from baton.worker.kv_layout import kv_layout

GOLDEN = Path(__file__).with_name("torch_golden.json")
VERSION = ".".join(torch.__version__.split(".")[:2])


@dataclass(frozen=True)
class Case:
    stored: TensorType = F32
    quantization: str = "none"
    kv_dtype: str = "float32"
    experts: str = ""
    "One of MIXTURES."


CASES = {
    "float32": Case(),
    "float16 keys": Case(kv_dtype="float16"),
    "Q4_K": Case(stored=Q4_K),
    "softmax experts": Case(experts="softmax"),
    "sigmoid experts": Case(experts="sigmoid"),
    "gpt-oss experts": Case(stored=MXFP4, experts="gpt-oss"),
}


class Operations(TorchDispatchMode):
    """Digests every operation on tensors while it is entered. One object for one digest."""

    def __init__(self) -> None:
        super().__init__()
        self._digest = sha256()
        self._names = {0: "empty"}
        "Name of each memory: the operation that made it, or a digest of its content."
        self._alive: list[Tensor] = []
        "No address is used twice while this is digested."
        self._count = 0

    def hexdigest(self) -> str:
        return self._digest.hexdigest()[:24]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        described = [self._describe(value) for value in (*args, *sorted(kwargs.items()))]
        results = operation(*args, **kwargs)
        fresh = [tensor for tensor in _tensors(results) if _memory(tensor) not in self._names]
        aliases = [argument.alias_info for argument in operation._schema.arguments]
        writes = any(alias is not None and alias.is_write for alias in aliases)
        if fresh or writes or not _tensors(results):
            self._digest.update(f"{operation.overloadpacket} {described}\n".encode())
        for tensor in fresh:
            self._count += 1
            self._name(tensor, f"#{self._count}")
        return results

    def _describe(self, value: Any) -> str:
        if isinstance(value, Tensor):
            if _memory(value) not in self._names:
                content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                self._name(value, sha256(content).hexdigest()[:16])
            return f"{self._names[_memory(value)]} {value.dtype} {list(value.shape)} {value.stride()} {value.storage_offset()}"
        if isinstance(value, list | tuple):
            return str([self._describe(each) for each in value])
        return repr(value)

    def _name(self, tensor: Tensor, name: str) -> None:
        self._names[_memory(tensor)] = name
        self._alive.append(tensor)


def _memory(tensor: Tensor) -> int:
    """Its address: the same for an array that was made of a tensor, and for a tensor that is made of that."""
    return tensor.untyped_storage().data_ptr() if tensor.untyped_storage().nbytes() else 0


def _tensors(results: Any) -> list[Tensor]:
    return [each for each in (results if isinstance(results, list | tuple) else [results]) if isinstance(each, Tensor)]


def digest_of(case: Case) -> str:
    config = replace(CONFIG, experts=MIXTURES[case.experts])
    if case.experts == "gpt-oss":
        config = replace(config, traits=OSS_TRAITS, rope=OSS_ROPE)
    settings: dict[str, Any] = {"quantization": case.quantization, "kv_dtype": case.kv_dtype, "threads": 1}
    opened = OpenedModel(Path(), config, GoldenWeights(config, (case.stored,)))
    loaded = load_torch(opened, WorkerConfig(block_size=BLOCK, **settings))
    width = -(-config.context_tokens_max // BLOCK)
    pool = KVPool.create(kv_layout(config, BLOCK, loaded.kv), 4 * width)
    tables = np.arange(4 * width, dtype=np.int32)[::-1].reshape(4, width).copy()
    forward, operations = loaded.with_pool(pool), Operations()
    assert isinstance(forward, TorchForward)
    with operations:
        for parts in SHORT[:3]:
            forward.logits(forward.hidden(batch_of(tables, parts)))
    digest = operations.hexdigest()
    operations._alive.clear()
    forward.close()
    del forward
    pool.close()
    return digest


def digests() -> dict[str, str]:
    return {name: digest_of(case) for name, case in CASES.items()}


def written() -> dict[str, list[Entry]]:
    """Entries per minor version of torch, the last one last."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def main() -> None:
    golden, here = written(), digests()
    print(json.dumps({VERSION: here}, indent=2))
    if "--write" in sys.argv:
        entries = golden.get(VERSION)
        golden[VERSION] = with_digests(entries, here) if entries else [{"arithmetic": TORCH, "digests": here}]
        GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    main()
