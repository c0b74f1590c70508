"""A step on the GPU in plain torch (--compute torch): the oracle of the kernels, and their fallback.

The same forward pass as on a CPU (forward/torch_forward.py), with weights and pool on the device. Each step waits for the host.
"""

from __future__ import annotations

from baton.config import WorkerConfig
from baton.kvpool.base import Pool
from baton.kvpool.layout import KVKind
from baton.models.decoder import Decoder
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedModel
from baton.models.ranks import TensorCollective
from baton.worker.attention.gathered import GatheredAttention
from baton.worker.cuda.loader import DeviceWeights
from baton.worker.executors.base import LoadedExecutor
from baton.worker.executors.stepwise import stepwise
from baton.worker.forward.base import LoadedForward
from baton.worker.forward.torch_forward import TorchForward


def load_plain(
    opened: OpenedModel,
    settings: WorkerConfig,
    kind: KVKind,
    progress: Progress | None,
    collective: TensorCollective | None = None,
) -> LoadedExecutor:
    raw = RawWeights(opened.weights, opened.config, progress)
    with DeviceWeights(raw, settings.dtype, opened.files) as weights:
        decoder = Decoder(opened.config, weights, collective)
    raw.close()

    def bound(pool: Pool) -> TorchForward:
        return TorchForward(decoder, GatheredAttention(opened.config, pool))

    return stepwise(LoadedForward(kind, bound))
