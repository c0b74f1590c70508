"""DeviceSteps (worker/cuda/graphs.py) without a GPU: every step is computed when it is launched, in Triton's interpreter."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from baton.worker.cuda.step_inputs import decode_views, ints_needed, mixed_views, pack_decode, pack_mixed


class InterpretedSteps:
    def __init__(self, step):
        self.step = step
        limits = step.limits
        self._ints = np.zeros(ints_needed(limits.rows, limits.sampled, step.rows_per_tile), np.int32)
        self.kinds = []
        "Of the steps so far: decode or mixed."

    def queueing(self):
        return nullcontext()

    def close(self):
        pass

    def write_tables(self, slots, places, blocks):
        self.step.tables[torch.from_numpy(slots), torch.from_numpy(places)] = torch.from_numpy(blocks).to(torch.int32)

    def launch(self, batch):
        step, kv_heads = self.step, self.step.config.kv_heads
        if batch.decodes:
            bucket = min(1 << (len(batch.slots) - 1).bit_length(), step.limits.sampled)
            packing, views = pack_decode(batch, bucket, self._ints, kv_heads, fixed=step.deterministic), decode_views
        else:
            packing, views = pack_mixed(batch, self._ints, kv_heads, step.rows_per_tile, fixed=step.deterministic), mixed_views
        if batch.draws:
            step.adjustments.write_rules(batch.bans, batch.masks)
        if batch.draft_counts is not None:
            step.adjustments.write_draft_counts(batch.draft_counts)
        self.kinds.append("decode" if batch.decodes else "mixed")
        step.run(views(packing, torch.from_numpy(self._ints.copy())), draws=batch.draws, even=batch.decodes and batch.even)
        done = SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda later: 0.0)
        broken = None if batch.decodes else step.broken(len(batch.token_ids)).clone()
        due, words, prompts = int(batch.due.sum()), None, None
        if batch.token_logprobs:
            words = step.adjustments.logprob_words[:due].clone()
        if batch.prompts is not None:
            step.write_prompt_logprobs(
                *map(torch.from_numpy, (batch.prompts.rows, batch.prompts.tokens, batch.prompts.top_logprobs))
            )
            prompts = step.adjustments.prompt_words[: len(batch.prompts.rows)].clone()
        pooled = None if batch.pooled is None else step.pool_rows(torch.from_numpy(batch.pooled)).clone()
        tokens = step.tokens(due).clone()
        return SimpleNamespace(done=done, tokens=tokens, broken=broken, logprob_words=words, prompts=prompts, pooled=pooled)
