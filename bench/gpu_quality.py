"""What fp8 costs in quality on a GPU, with a trained model: weights, KV cache and both against bfloat16.

    python bench/gpu_quality.py [--model smollm2] [--windows 24] [--window 512]

The text is this repository's documentation (docs/**/*.md, sorted by path), in windows at even distances; every token
of a window but the first is scored. Whole windows are one step each, so activations are rounded as well where weights are in
fp8; in chunks of 32 tokens (`chunks`) they are not, as in decode steps of up to 32 sequences.

ppl           exp of the mean negative log-probability of a token
difference    of it against bfloat16, token by token; ± is its standard error
KL            of the distribution after a token from that of bfloat16, in thousandths of a nat, mean
same          how often the likeliest token is the same
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton.models.config import ModelConfig
from baton.models.loaders.weights import RawWeights
from baton.models.names import resolve
from baton.models.open import open_model
from baton.models.torch_weights import Weights
from baton.text.loading import load_model_text
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.graphs import DeviceSteps
from baton.worker.cuda.layer_steps import StepLimits
from baton.worker.cuda.weights import DecoderWeights, take_weights
from gpu_8_bits import batch_of, in_blocks
from quality import evenly

KINDS = {
    "bfloat16": ("none", False),
    "KV cache in fp8": ("none", True),
    "weights in fp8, scales of outputs": ("outputs", False),
    "weights in fp8, scales of blocks": ("blocks", False),
    "weights (outputs) and KV cache": ("outputs", True),
    "weights (blocks) and KV cache": ("blocks", True),
}
CHUNK, BLOCK_SIZE = 32, 16
DOCS = Path(__file__).parent.parent / "docs"


@dataclass
class Sums:
    """Over all tokens that were scored."""

    losses: list[torch.Tensor]
    divergence: float = 0.0
    same: int = 0


@torch.inference_mode()
def main() -> None:
    options = read_options()
    path = resolve(options.model)
    opened = open_model(path)
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
    windows = np.array(evenly(load_model_text(str(path)).tokenizer.encode(text), options.window, options.windows))
    print(f"{path.name}: {windows.shape[0]} windows of {windows.shape[1]} tokens")
    exact: dict[int, list[torch.Tensor]] = {}
    print("| | rows | ppl | against bfloat16 | KL | same |\n| --- | --- | --- | --- | --- | --- |")
    for name, (of_weights, of_kv) in KINDS.items():
        raw = RawWeights(opened.weights, opened.config)
        weights = take_weights(
            opened.config, Weights(raw, dtype=torch.bfloat16, device="cuda").take, fp8=of_weights == "outputs"
        )
        weights = in_blocks(weights) if of_weights == "blocks" else weights
        steps = make_steps(opened.config, weights, of_kv, options.window)
        for chunk in (options.window, CHUNK):
            found = Sums([])
            for number, window in enumerate(windows):
                logs = log_probabilities(steps, window, chunk)
                if name == "bfloat16":
                    exact.setdefault(chunk, []).append(logs)
                add(found, logs, exact[chunk][number], window)
            print(line(name, "chunks" if chunk == CHUNK else "windows", found), flush=True)


def make_steps(config: ModelConfig, weights: DecoderWeights, of_kv: bool, window: int) -> DeviceSteps:
    kind, blocks = torch.float8_e4m3fn if of_kv else torch.bfloat16, -(-window // BLOCK_SIZE)
    pool = torch.zeros(blocks, config.layers, 2, config.kv_heads, BLOCK_SIZE, config.head_dim, device="cuda").to(kind)
    limits = StepLimits(rows=window, sequences=1, context_tokens=blocks * BLOCK_SIZE)
    step = DecoderStep(config, weights, pool, limits)
    step.tables.copy_(torch.arange(blocks)[None])
    return DeviceSteps(step)


def log_probabilities(steps: DeviceSteps, window: np.ndarray, chunk: int) -> torch.Tensor:
    """[tokens - 1, vocabulary]: of the token that follows each."""
    weights, eps, rows = steps.step.weights, steps.step.config.norm_eps, []
    for at in range(0, len(window), chunk):
        part = window[None, at : at + chunk]
        steps.launch(batch_of(part, at)).done.synchronize()
        residual, added = steps.step.last_hidden
        hidden = residual.clone() if added is None else residual.float() + added.float()  # the next step writes there
        rows.append(hidden[: part.size].to(weights.embedding.dtype))
    normed = norm(torch.cat(rows)[:-1], weights.final_norm.weight, eps)
    return (normed.float() @ weights.head.float().t()).log_softmax(-1)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)


def add(sums: Sums, logs: torch.Tensor, exact: torch.Tensor, window: np.ndarray) -> None:
    tokens = torch.from_numpy(window[1:]).to(logs.device)[:, None]
    sums.losses.append(torch.cat((logs.gather(1, tokens), exact.gather(1, tokens)), 1).double().cpu())
    sums.divergence += float((exact.exp() * (exact - logs)).sum())
    sums.same += int((logs.argmax(1) == exact.argmax(1)).sum())


def line(name: str, rows: str, sums: Sums) -> str:
    ours, exact = torch.cat(sums.losses).unbind(1)
    worse = exact - ours
    difference, error = float(worse.mean().exp() - 1), float(worse.std()) / len(worse) ** 0.5
    cells = (
        f"{float((-ours.mean()).exp()):.3f}",
        f"{100 * difference:+.2f} % ± {100 * error:.2f}",
        f"{1000 * sums.divergence / len(ours):.2f}",
        f"{100 * sums.same / len(ours):.1f} %",
    )
    return f"| {name} | {rows} | {' | '.join(cells)} |"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model without experts, as for baton serve; GGUF too")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    return parser.parse_args()


if __name__ == "__main__":
    main()
