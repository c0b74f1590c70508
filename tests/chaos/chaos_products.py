"""Requests whose sizes and counts are multiplied: each field within its bounds or a little beyond, all of them large at once.

Counts are drawn evenly over their orders of magnitude, up to twice what a limit allows, and a body has up to 8 MB. Pass: no
5xx, nobody dies, and no process ever takes more memory than MEMORY_MIB_MAX. `chaos_fuzz.py --products` runs them.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

from chaos_model import VOCABULARY

BODY_BYTES_MAX: Final = 8 * 1024 * 1024 - 1
MEMORY_MIB_MAX: Final = {"supervisor": 128, "front": 640, "engine": 320, "worker": 640, "templates": 320}
"""Peak resident memory of each process, for a tiny model. The front's: 256 MiB of bytes in flight, and what is made of them."""

LETTERS = ("a", "0123456789", " ", "word ", "é", "日本", "\U0001f600", "\x00", "<|end|>", "{{ 7 }}", "\ud83d", "\n\n")


class Products:
    def __init__(self, seed: str) -> None:
        self.dice = random.Random(f"products {seed}")
        self._share = self.dice.choice((0.49, 0.25)) if self.dice.random() < 0.15 else None
        "Every count is this share of its most: each field is within its limit, and all are large at once."
        self._left = BODY_BYTES_MAX // 2 if self._share else self.count(BODY_BYTES_MAX)
        "Characters that this body may still have."

    def call(self) -> tuple[str, Any, dict[str, str]]:
        dice = self.dice
        kind = dice.random()
        headers = {"idempotency-key": str(dice.randrange(5000))} if dice.random() < 0.1 else {}
        if kind < 0.5:
            return "/v1/completions", self.body(self.completion()), headers
        if kind < 0.8:
            return "/v1/chat/completions", self.body(self.chat()), headers
        if kind < 0.9:
            return "/tokenize", self.body({"prompt": self.text(), "return_token_strs": dice.random() < 0.5}), headers
        return "/detokenize", self.body({"tokens": self.ids(2_000_000)}), headers

    def count(self, most: int) -> int:
        """Evenly over orders of magnitude, 0 too."""
        if self._share is not None:
            return max(1, int(self._share * most))
        return int(most ** self.dice.random()) - (self.dice.random() < 0.02)

    def text(self, most: int = BODY_BYTES_MAX) -> str:
        letter = self.dice.choice(LETTERS)
        length = max(0, min(self.count(most), self._left) // len(letter))
        self._left -= length * len(letter)
        return letter * length

    def ids(self, most: int) -> list[int]:
        length = max(0, min(self.count(most), self._left // 5))
        self._left -= 5 * length
        return [self.dice.randrange(VOCABULARY)] * length

    def completion(self) -> dict[str, Any]:
        dice = self.dice
        many = range(self.count(130))
        if self._share is not None:
            return {"prompt": [f"tale {place}" for place in many], **self.options()}
        lists = (lambda: [self.text(300) for _ in many], lambda: [self.ids(600) for _ in many])
        prompt = dice.choice((self.text, lambda: self.ids(2_000_000), *lists))()
        body = {"prompt": prompt, "echo": dice.random() < 0.2, **self.options()}
        if dice.random() < 0.3:
            body["logprobs"] = self.count(22)
        return body

    def chat(self) -> dict[str, Any]:
        dice = self.dice
        size = self.count(100_000)
        messages = [{"role": dice.choice(("user", "assistant")), "content": self.text(size)} for _ in range(self.count(9000))]
        body = {"messages": messages, **self.options()}
        if dice.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": self.count(22)}
        return body

    def options(self) -> dict[str, Any]:
        dice = self.dice
        if self._share is not None:  # what every prompt and every sequence has of its own, unless somebody shares it
            size = self.count(2000)
            return {"max_tokens": 2, "bad_words": [f"{place:03}{self.text(size)}"[:size] for place in range(self.count(2000))]}
        size = self.count(2000)
        extras = {
            "n": lambda: self.count(32),
            "stop": lambda: [self.text(size) for _ in range(self.count(32))],
            "stop_token_ids": lambda: self.ids(2000),
            "logit_bias": lambda: {str(dice.randrange(VOCABULARY)): 1.0 for _ in range(self.count(2000))},
            "bad_words": lambda: [self.text(size) for _ in range(self.count(2000))],
            "prompt_logprobs": lambda: self.count(22),
            "min_tokens": lambda: self.count(20),
            "metadata": lambda: [[1] * self.count(1000)] * self.count(1000),
            "surprise": lambda: self.ids(2_000_000),
            "chat_template_kwargs": lambda: {f"k{place}": self.text(1000) for place in range(self.count(200))},
            "repetition_penalty": lambda: 1.5,
            "return_token_ids": lambda: True,
        }
        options: dict[str, Any] = {"max_tokens": self.count(12), "stream": dice.random() < 0.3}
        for name in dice.sample(sorted(extras), dice.randint(0, 5)):
            options[name] = extras[name]()
        return options

    def body(self, content: dict[str, Any]) -> bytes:
        dice = self.dice
        data = json.dumps(content, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
        if dice.random() < 0.03:
            data = data[: dice.randrange(len(data))]
        return data[:BODY_BYTES_MAX]


def memory_problems(peaks: dict[str, float]) -> list[str]:
    return [
        f"the {role} took {peak:.0f} MiB; at most {MEMORY_MIB_MAX[role]} are allowed"
        for role, peak in peaks.items()
        if peak > MEMORY_MIB_MAX[role]
    ]
