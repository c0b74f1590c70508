"""Tokens per second with a draft model on a GPU (--speculate draft:MODEL), against those without.

    python bench/draft_model_gpu.py         Llama-3-8B's shape with a draft model of Llama-3.2-1B's; bfloat16; 1, 4, 16 at once

Weights are random, so the two models agree on nothing: it is drawn which drafts are right. Both models compute all that they
would otherwise: accepted tokens are the drafts themselves, so neither pool has them to compute again.

rounds     milliseconds of the draft model for all drafts of a step, with the host's part
all        every sequence has all its drafts in every step
of it      as a share of what a plain step with as many rows and the rounds would give without anything in between
by price   as a server does: how many drafts run is decided by their price. 0 % right: what a useless draft model costs
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from baton.llm import LLM, SamplingParams
from baton.models.config import ModelConfig
from baton.models.shapes import SHAPES
from baton.worker.arrays import Int64s
from baton.worker.draft_rows import DraftRows
from baton.worker.drafters.model_price import ModelPrice
from baton.worker.drafters.price import DraftPrice
from baton.worker.drafters.priced_model import PricedModel
from baton.worker.executors.base import Sampled
from baton.worker.failure import Failure
from baton.worker.input_batch import InputBatch
from gpu_serving import text_folder
from speculate_gpu import PROMPT, VOCABULARY, Chance, numbers


def accept_drafts_by(chance: Chance) -> Callable[..., Int64s]:
    """DraftRows.accept with drawn results: accepted tokens are the drafts."""

    def accept(rows: DraftRows, tokens: Int64s, failures: dict[int, Failure], sampled: Sampled) -> Int64s:
        starts, drafts = rows.batch.spans.starts[:-1].tolist(), rows.batch.drafts
        assert drafts is not None
        last = np.array(starts, np.int64)
        for place, (row, most) in enumerate(zip(starts, drafts.tolist(), strict=True)):
            if count := chance.leading(most):
                sampled.accepted[place] = rows.batch.token_ids[row + 1 : row + 1 + count].tolist()
            sampled.tokens[place], last[place] = tokens[row + count], row + count
        return last

    return accept


class ChanceModel(PricedModel):
    """A draft that was not run would have been right by chance too."""

    chance = Chance(0.0)

    def _learn_from_unused(self, price: ModelPrice, batch: InputBatch) -> None:
        for slot, (position, _) in list(self._guesses.items()):
            if position < batch.lengths[slot]:
                price.accepted(slot, 1, int(self.chance.right()))
                del self._guesses[slot]


def draft_folder(scratch: Path, shape: ModelConfig) -> Path:
    """A model of this shape, with the tokenizer of text_folder. Its weights are not read."""
    folder = text_folder(scratch, shape.vocab_size)
    written = json.loads((folder / "config.json").read_text())
    sizes = {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "max_position_embeddings": shape.context_tokens_max,
        "tie_word_embeddings": shape.tied_embeddings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**written, **sizes}))
    return folder


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path, draft: Path) -> None:
        self.options = options
        most = max(options.batches) * (1 + options.drafts)
        self.llm = LLM(
            str(folder), device="cuda", load_format="dummy", model_shape=options.shape, max_num_seqs=most,
            max_num_batched_tokens=4096, kv_blocks=most * (PROMPT + options.tokens + 64) // 16 + 64, max_model_len=2048,
            speculate=f"draft:{draft}", speculative_tokens=options.drafts, stop_on_repetition=False,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.rates: dict[int, float] = {}
        "Tokens per second without drafts, by batch."
        drafting = self.llm._runner._draft_model
        assert drafting is not None
        self.drafter = drafting._drafter
        self.rounds: list[float] = []
        "Seconds of the proposals so far."
        self._time_rounds()

    def run(self, batch: int, **sampling: Any) -> float:
        """Tokens per second from the moment on that all sequences have a token: the median of the repeats."""
        prompts = [[random.Random(number).randrange(2, VOCABULARY) for _ in range(PROMPT)] for number in range(batch)]
        asked = SamplingParams(temperature=0.0, max_tokens=self.options.tokens, ignore_eos=True, **sampling)
        rates = []
        for _ in range(self.options.repeats):
            began, made, seen = 0.0, 0, set[int]()
            for chunk in self.llm.stream(prompts, asked):
                seen.add(chunk.prompt_index)
                made += len(chunk.token_ids)
                if len(seen) == batch and not began:
                    began, made = perf_counter(), 0
            rates.append(made / (perf_counter() - began))
        return median(rates)

    def plain(self, batch: int) -> float:
        if batch not in self.rates:
            self.rates[batch] = self.run(batch, disable_spec_decode=True)
        return self.rates[batch]

    def _time_rounds(self) -> None:
        propose = self.drafter.propose_all

        def timed(*given: Any) -> dict[int, list[int]]:
            began = perf_counter()
            found: dict[int, list[int]] = propose(*given)
            self.rounds.append(perf_counter() - began)
            return found

        self.drafter.propose_all = timed

    def drafting(self, batch: int, share: float, *, by_price: bool) -> float:
        chance, runner = Chance(share), self.llm._runner
        runner._price = DraftPrice(runner.executor.row_cost, waits=True) if by_price else None
        runner._draft_model = ChanceModel(self.drafter, runner._price)
        runner._draft_model.chance = chance
        DraftRows.accept = accept_drafts_by(chance)  # type: ignore[method-assign]
        self.rounds.clear()
        self.llm._begin()
        return self.run(batch)

    def table(self) -> list[dict[str, Any]]:
        made, options, drafts = [], self.options, self.options.drafts
        print("| at once | right | plain tok/s | rounds ms | all drafts | ratio | of it | by price | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for batch in options.batches:
            rows, plain = batch * (1 + drafts), self.plain(batch)
            for share in options.acceptance:
                found = self.drafting(batch, share, by_price=False)
                rounds = median(self.rounds)
                tokens = batch * sum(share**place for place in range(drafts + 1))
                expected = tokens / (rows / self.plain(rows) + rounds)
                priced = self.drafting(batch, share, by_price=True)
                row = {
                    "batch": batch, "right": share, "plain": plain, "rounds_ms": 1e3 * rounds, "all": found,
                    "all_ratio": found / plain, "of_expected": found / expected, "by_price": priced, "ratio": priced / plain,
                }  # fmt: skip
                made.append(row)
                print(
                    f"| {batch} | {share:.0%} | {plain:.0f} | {1e3 * rounds:.2f} | {found:.0f} | {found / plain:.2f} | "
                    f"{found / expected:.2f} | {priced:.0f} | {priced / plain:.2f} |",
                    flush=True,
                )
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--draft-shape", default="llama-3.2-1b")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--acceptance", type=numbers, default=[0, 50, 75, 90], help="per cent")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args()
    options.acceptance, options.deterministic = [share / 100 for share in options.acceptance], False
    with tempfile.TemporaryDirectory() as scratch:
        main_model = text_folder(Path(scratch) / "main", VOCABULARY)
        bench = Bench(options, main_model, draft_folder(Path(scratch) / "draft", SHAPES[options.draft_shape]))
        rows = bench.table()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
