"""As it is served: twenty prompts get the same thirty-two tokens alone, all together, and all together in small chunks."""

from __future__ import annotations

import pytest
from rig import Rig, load_path

from baton.text.tokenizer import Tokenizer

OUTPUT_TOKENS = 32
TOPICS = (
    *("the sea", "prime numbers", "a lost umbrella", "the French Revolution", "photosynthesis", "chess", "tax law"),
    *("volcanoes", "bread", "the moon"),
)
SHAPES = ("Tell me about {}.", "<|im_start|>user\nWrite a poem about {}.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_greedy_answers_do_not_depend_on_company(smollm2_path):
    tokenizer = Tokenizer.from_path(smollm2_path)
    model = load_path(smollm2_path, quantization="auto", compute="native", threads=2)
    texts = [shape.format(topic) for topic in TOPICS for shape in SHAPES]
    prompts = {f"p{i}": tokenizer.encode(text, parse_special=True) for i, text in enumerate(texts)}
    assert len(prompts) == 20

    def answers(names: list[str], chunk: int | None = None) -> dict[tuple[str, int], list[int]]:
        rig = Rig(model, block_size=16, blocks=100, slots=20, chunk=chunk)
        for name in names:
            rig.submit(name, prompts[name], max_tokens=OUTPUT_TOKENS)
        said = rig.run()
        rig.close()
        return said

    together = answers(list(prompts))
    assert all(len(answer) == OUTPUT_TOKENS for answer in together.values())
    assert answers(list(prompts), chunk=7) == together
    for name in prompts:
        assert answers([name])[name, 0] == together[name, 0]
