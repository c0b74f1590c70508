"""One rank of a set on a GPU, or in Triton's interpreter, as a process of its own.

rank_steps.py RANK RANKS FOLDER DEVICE DTYPE MODE;... CASE;...: for each case, the tokens of a prompt's step and of decode
steps, and the logits, written to FOLDER/CASE MODE.RANKofRANKS.npz. Rank 0 of 1 computes the whole model.
"""

import sys
from dataclasses import replace
from pathlib import Path

from baton.models.config import Experts, ModelConfig, RopeConfig, Traits
from baton.models.shapes import SHAPES

PLAIN = ModelConfig(
    architecture="llama", vocab_size=300, layers=2, hidden_size=64, heads=4, kv_heads=2, head_dim=32, intermediate_size=96,
    rope=RopeConfig(theta=10000.0), norm_eps=1e-5, tied_embeddings=False, context_tokens_max=256,
)  # fmt: skip
MIXTURE = Experts(count=8, per_token=3, inner_size=32, normalised=True)
SHARED = replace(MIXTURE, scoring="sigmoid", correction=True, scale=1.5, shared_size=64, shared_gate=True, layers=(False, True))
CASES = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tied_embeddings=True, traits=Traits(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)),
    "post norms": replace(PLAIN, traits=Traits(norms="both", activation="gelu_tanh", layer_windows=(5, None))),
    "parallel": replace(PLAIN, traits=Traits(parallel=True, layer_norm=True, norm_bias=True, sinks=True)),
    "experts": replace(PLAIN, experts=MIXTURE),
    "shared expert": replace(PLAIN, experts=SHARED),
    "one kv head": replace(PLAIN, kv_heads=1),
}
LARGE = {
    "8B shape": replace(SHAPES["llama-3.1-8b"], layers=2),
    "30B-A3B shape": replace(SHAPES["qwen3-30b-a3b"], layers=2),
}
"""For GPUs."""
WHOLE = {
    "8B shape, all layers": SHAPES["llama-3.1-8b"],
    "30B-A3B shape, 4 layers": replace(SHAPES["qwen3-30b-a3b"], layers=4),
}
"""For GPUs with 40 GiB, loaded as a worker loads them, and decoded for longer."""
WHOLE_DECODES = 16
PROMPTS = {0: [5, 9, 200, 31, 7, 7, 80, 11], 3: [250, 1, 2]}


def run(config, weights, collective, *, deterministic, decodes=2):
    """Prompts together, then a decode step of both and one of a single row, which has kernels of its own."""
    import numpy as np
    from step_rig import StepRig

    rig = StepRig(config, weights, deterministic=deterministic, slots=4, context=32, rows=16, collective=collective)
    tokens, logits = rig.run({slot: (0, ids) for slot, ids in PROMPTS.items()}, draws=False)
    all_tokens, all_logits = [tokens], [logits.float().cpu().numpy()]
    for at in range(decodes):
        work = {slot: (len(ids) + at, [int(token)]) for (slot, ids), token in zip(PROMPTS.items(), tokens, strict=False)}
        work = work if at == 0 else {0: work[0]}
        tokens, logits = rig.run(work, bucket=len(work), draws=False)
        all_tokens.append(tokens)
        all_logits.append(logits.float().cpu().numpy())
    return {"tokens": np.concatenate(all_tokens), "logits": np.concatenate(all_logits)}


def compute(config, rank, ranks, collective, device, dtype, mode, **more):
    """Of random weights."""
    import torch

    from baton.models.loaders.sharded import sharded
    from baton.models.loaders.weights import RawWeights
    from baton.models.shard import Shard
    from baton.models.torch_weights import Weights
    from baton.worker.cuda.weights import take_weights

    part, source = sharded(config, drawn_in_parallel(config), Shard(rank, ranks))
    raw = Weights(RawWeights(source, part), dtype=dtype, device=device)
    with torch.inference_mode():
        return run(part, take_weights(part, raw.take), collective, deterministic=mode == "deterministic", **more)


def compute_whole(config, rank, ranks, collective, mode):
    """In float32, by the loader of GPUs."""
    import torch

    from baton.models.loaders.sharded import sharded
    from baton.models.loaders.weights import RawWeights
    from baton.models.shard import Shard
    from baton.worker.cuda.loader import DeviceWeights
    from baton.worker.cuda.weights import take_weights

    part, source = sharded(config, drawn_in_parallel(config), Shard(rank, ranks))
    with torch.inference_mode():
        with DeviceWeights(RawWeights(source, part), "float32") as loading:
            weights = take_weights(part, loading.take)
        return run(part, weights, collective, deterministic=mode == "deterministic", decodes=WHOLE_DECODES)


def drawn_in_parallel(config):
    """Random weights, of which threads draw all but small tensors, an expert's among them: billions of numbers in seconds."""
    import zlib
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from baton.models.loaders.dummy import DummyWeights
    from baton.models.raw_tensor import RawTensor

    chunk, threads = 1 << 18, ThreadPoolExecutor(8)

    class Drawn(DummyWeights):
        def raw(self, name):
            shape = self._shapes[name]
            if (size := int(np.prod(shape))) < chunk:
                return super().raw(name)
            values = np.empty(size, np.float32)

            def draw(at):
                generator = np.random.Generator(np.random.SFC64([zlib.crc32(name.encode()), at]))
                generator.standard_normal(out=values[at : at + chunk], dtype=np.float32)
                values[at : at + chunk] *= shape[-1] ** -0.5

            list(threads.map(draw, range(0, size, chunk)))
            return RawTensor.of_floats(values.reshape(shape))

    return Drawn(config, 7)


def main(rank, ranks, folder, device, dtype, modes, cases):
    import numpy as np
    import torch

    from baton.models.shard import Shard
    from baton.worker.collective.distributed import DistributedCollective

    collective = DistributedCollective(Shard(rank, ranks), folder, device, wait_seconds=300.0) if ranks > 1 else None
    for case in cases:
        for mode in modes:
            if case in WHOLE:
                found = compute_whole(WHOLE[case], rank, ranks, collective, mode)
            else:
                found = compute((CASES | LARGE)[case], rank, ranks, collective, device, getattr(torch, dtype), mode)
            np.savez(folder / f"{case} {mode}.{rank}of{ranks}.npz", **found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    rank, ranks, folder, device, dtype, modes, cases = sys.argv[1:]
    main(int(rank), int(ranks), Path(folder), device, dtype, modes.split(";"), cases.split(";"))
