"""The forward pass in torch: the oracle, the fallback without a C compiler, and the way to other devices."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from baton.config import WorkerConfig
from baton.models.decoder import Decoder
from baton.models.layers.norm import LayerNorm
from baton.models.load import build_model
from baton.models.loaders.weights import Progress
from baton.models.open import OpenedModel
from baton.models.ranks import TensorCollective
from baton.native.exchange import RankExchange
from baton.protocol.progress import ProgressWord
from baton.worker.arithmetic import TORCH
from baton.worker.arrays import Floats, Int64s
from baton.worker.attention.gathered import GatheredAttention
from baton.worker.collective.base import Collective
from baton.worker.draws import Draws, choose, likeliest
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import LoadedForward, torch_kv_kind
from baton.worker.token_masks import Masks


def load_torch(
    opened: OpenedModel,
    settings: WorkerConfig,
    progress: Progress | None = None,
    collective: TensorCollective | None = None,
) -> LoadedForward:
    """Reads the weights. `settings.threads` is a resolved number of threads. `collective`: the other ranks of a set."""
    torch.set_num_threads(settings.threads)
    decoder = build_model(
        opened.config, opened.weights, quantization=settings.quantization, progress=progress, collective=collective
    )
    return LoadedForward(torch_kv_kind(settings), lambda pool: TorchForward(decoder, GatheredAttention(opened.config, pool)))


class HostTensors:
    """Exchanges tensors of the main memory through memory that the ranks share."""

    def __init__(self, exchange: RankExchange) -> None:
        self._exchange = exchange

    def sum(self, rows: Tensor) -> None:
        self._exchange.sum(rows.numpy())

    def gather(self, part: Tensor) -> Tensor:
        return torch.from_numpy(self._exchange.gather(part.numpy()))


def of_tensors(collective: Collective | None) -> TensorCollective | None:
    """The exchange for tensors."""
    if isinstance(collective, RankExchange):
        return HostTensors(collective)
    assert collective is None or isinstance(collective, TensorCollective)
    return collective


class TorchForward:
    """Forward pass on the decoder's device."""

    def __init__(self, decoder: Decoder, attention: GatheredAttention) -> None:
        device = decoder.device
        self.name = "torch" if device.type == "cpu" else f"torch ({device.type})"
        self.arithmetic = f"torch {TORCH} {torch.__version__} {machine_of(device)}"
        self.config = decoder.config
        norm = decoder.final_norm
        weight, bias = norm.weight, norm.bias if isinstance(norm, LayerNorm) else None
        self.final_norm = _floats(weight), None if bias is None else _floats(bias)
        self.decoder = decoder
        self.attention = attention

    @torch.inference_mode()
    def hidden(self, flat: FlatBatch) -> Floats:
        token_ids, positions = (torch.from_numpy(column).to(self.decoder.device) for column in (flat.token_ids, flat.positions))
        hidden: Floats = self.decoder.forward(token_ids, positions, self.attention.begin(flat.spans)).float().cpu().numpy()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Floats) -> Floats:
        rows = torch.from_numpy(hidden).to(self.decoder.device, self.decoder.dtype)
        logits: Floats = self.decoder.logits(rows).float().cpu().numpy()
        return logits

    def likeliest(self, hidden: Floats, masks: Masks | None = None) -> Int64s:
        return likeliest(self.logits(hidden), masks)

    def choose(self, logits: Floats, draws: Draws, masks: Masks | None = None) -> Int64s:
        return choose(logits, draws, masks)

    def report_progress(self, word: ProgressWord) -> None:
        self.decoder.on_layer = word.advance

    def close(self) -> None:
        del self.attention


def machine_of(device: torch.device) -> str:
    """The facts by which torch chooses its kernels."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _floats(tensor: Tensor) -> Floats:
    values: Floats = tensor.detach().float().cpu().numpy()
    return values
