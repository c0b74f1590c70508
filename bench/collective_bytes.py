"""Bytes that the ranks of a worker set exchange per step: the table of docs/tensor-parallel.md.

    python bench/collective_bytes.py

Computed, not measured. Each layer has two sums of hidden rows, and each sampled row one gather of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.models.config import ModelConfig
from baton.models.loaders.sharded import sharded_config
from baton.models.parameters import expected_shapes
from baton.models.shapes import SHAPES
from baton.models.shard import Shard
from measuring.goals import markdown

MODELS = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "235B": "qwen3-235b-a22b"}
RANKS = (2, 4, 8)
NUMBER_BYTES, LOGIT_BYTES = 2, 4
"""Hidden rows are bfloat16, logits float32."""
DECODE, CHUNK = (64, 64), (2048, 1)
"""Rows and sampled rows of a step: 64 sequences that decode, and a chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Of one rank and one step."""

    calls: int
    sums: int
    "Bytes that the rank receives for sums by a ring (NCCL), and sends as well."
    gathered_sums: int
    "The same if every rank receives the parts of all others and adds them in order (--deterministic, gloo, shared memory)."
    logits: int
    "Bytes of the other ranks' logits."


def exchanged(config: ModelConfig, ranks: int, rows: int, sampled: int) -> Exchanged:
    """config: of the whole model."""
    hidden = 2 * config.layers * rows * config.hidden_size * NUMBER_BYTES
    own = min(len(share) for share in sharded_config(config, Shard(0, ranks)).all_head_rows)
    return Exchanged(
        calls=2 * config.layers + 1,
        sums=2 * (ranks - 1) * hidden // ranks,
        gathered_sums=(ranks - 1) * hidden,
        logits=sampled * (config.vocab_size - own) * LOGIT_BYTES,
    )


def weight_bytes(config: ModelConfig, ranks: int) -> int:
    """Bytes of a rank's weights in bfloat16; of the largest part, if they differ."""
    parts = [sharded_config(config, Shard(rank, ranks)) for rank in range(ranks)]
    return max(sum(NUMBER_BYTES * _size(shape) for shape in expected_shapes(part).values()) for part in parts)


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


def table() -> str:
    rows = []
    for name, shape in MODELS.items():
        config = SHAPES[shape]
        for ranks in RANKS:
            decode, chunk = exchanged(config, ranks, *DECODE), exchanged(config, ranks, *CHUNK)
            rows.append(
                [
                    f"{name} ({shape})" if ranks == RANKS[0] else "",
                    str(ranks),
                    f"{weight_bytes(config, ranks) / 1e9:.1f} GB",
                    str(decode.calls),
                    *(f"{count / 1e6:,.0f} MB" for count in (decode.sums, decode.gathered_sums, decode.logits)),
                    *(f"{count / 1e6:,.0f} MB" for count in (chunk.sums, chunk.gathered_sums)),
                ]
            )
    heads = ["model", "ranks", "weights of a rank", "exchanges per step", "decode: sums", "in order", "logits", "chunk: sums"]
    return markdown([*heads, "in order"], rows)


if __name__ == "__main__":
    print(table())
