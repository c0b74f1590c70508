"""A hundred varied prompts, 64 tokens each: every token is the one that transformers (float32, the same weights) would choose.

The oracle runs once over each finished answer and says, at every place, what comes next after exactly those tokens. That is
greedy decoding checked token by token, in a hundred passes instead of 6,400.
"""

from __future__ import annotations

import pytest
import torch
from rig import generate, load_path
from test_smollm2 import oracle  # noqa: F401  a fixture of the model tests

from baton.text.tokenizer import Tokenizer

OUTPUT_TOKENS = 64

TOPICS = (
    *("the sea", "prime numbers", "a lost umbrella", "the French Revolution", "photosynthesis", "chess openings", "tax law"),
    *("volcanoes", "a recipe for bread", "the moon", "sorting algorithms", "jazz", "the immune system", "trains", "a haiku"),
    *("medieval castles", "inflation", "dinosaurs", "the colour blue", "a letter to a friend"),
)
SHAPES = (
    "Tell me about {}.",
    "def explain():\n    '''Explain {}'''\n    return ",
    "<|im_start|>user\nWrite three sentences about {}.<|im_end|>\n<|im_start|>assistant\n",
    "Q: What is interesting about {}?\nA: Well, 1) ... 2) ... 3)",
    "Überraschung! 今日は {} について話します. Été à 25 °C, {} again, and {} once more: ",
)
PROMPTS = [shape.replace("{}", topic) for topic in TOPICS for shape in SHAPES]


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 100])
def test_greedy_tokens_of_many_prompts_equal_transformers(smollm2_path, oracle, count):  # noqa: F811
    tokenizer = Tokenizer.from_path(smollm2_path)
    prompts = {f"p{i}": tokenizer.encode(text, parse_special=True) for i, text in enumerate(PROMPTS[:count])}
    assert len(prompts) == count
    model = load_path(smollm2_path)
    answers = generate(model, prompts, max_tokens=OUTPUT_TOKENS, rig={"slots": 32, "blocks": 700, "chunk": 64})
    for (name, _), answer in answers.items():
        assert len(answer) == OUTPUT_TOKENS
        with torch.no_grad():
            logits = oracle(torch.tensor([prompts[name] + answer])).logits[0, len(prompts[name]) - 1 : -1]
        chosen = logits.argmax(-1).tolist()
        if chosen != answer:  # only a tie within float32's rounding may be decided otherwise
            place = next(i for i, (ours, theirs) in enumerate(zip(answer, chosen, strict=True)) if ours != theirs)
            gap = float(logits[place].max() - logits[place, answer[place]])
            assert gap < 1e-4, f"{name}: token {place} is {answer[place]}, transformers says {chosen[place]} (gap {gap})"
            pytest.fail(f"{name}: a tie within rounding at token {place}: choose another prompt for this test")
