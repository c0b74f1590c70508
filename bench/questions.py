"""Twenty easy questions, asked as a user would: how many answers are right, and how many do not end.

An answer is right where one of the accepted words is in it, as a word of its own. It is endless where the model has not ended
it within TOKENS_MAX tokens, whether or not the right word is in it. Answers that the server ends because they repeat
themselves (stop_on_repetition) have an end; they are counted in a column of their own.

The questions were written before anything was measured with them, and none was replaced since: a set that is tuned to the
model measures the tuning. All are asked in English, with the model's own chat template and no system prompt of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

TOKENS_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    accepted: tuple[str, ...]
    "Words or numbers, in small letters."

    def is_answered_by(self, answer: str) -> bool:
        return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer.lower()) for word in self.accepted)


QUESTIONS: Final = (
    Question("What is the capital of Italy?", ("rome", "roma")),
    Question("What is the capital of Japan?", ("tokyo",)),
    Question("What is the capital of Germany?", ("berlin",)),
    Question("Which planet do we live on?", ("earth",)),
    Question("What colour is the sky on a clear day?", ("blue",)),
    Question("What is 2 + 3?", ("5", "five")),
    Question("How many legs does a dog have?", ("4", "four")),
    Question("How many days are there in a week?", ("7", "seven")),
    Question("How many months are in a year?", ("12", "twelve")),
    Question("What is frozen water called?", ("ice",)),
    Question("What is the opposite of hot?", ("cold", "cool")),
    Question("What is the largest ocean on Earth?", ("pacific",)),
    Question("Who wrote Romeo and Juliet?", ("shakespeare",)),
    Question("Which animal says meow?", ("cat", "cats", "kitten")),
    Question("What is the chemical formula of water?", ("h2o", "h₂o")),
    Question("What is the first letter of the English alphabet?", ("a",)),
    Question("In which country is the city of Madrid?", ("spain",)),
    Question("What do bees make?", ("honey", "honeycomb")),
    Question("Name the star at the centre of our solar system.", ("sun",)),
    Question("What is the plural of the word mouse?", ("mice",)),
)


@dataclass(slots=True)
class Marks:
    """What became of the answers to all questions."""

    asked: int = 0
    right: int = 0
    endless: int = 0
    repeating: int = 0
    "Ended because they repeat themselves."
    tokens: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    "Questions and the answers that are not right."

    def add(self, question: Question, output: Any) -> None:
        """`output` is one of LLM's: text, token_ids, finish_reason."""
        self.asked += 1
        self.tokens += len(output.token_ids)
        if question.is_answered_by(output.text):
            self.right += 1
        else:
            self.wrong.append((question.text, output.text))
        self.endless += output.finish_reason == "length"
        self.repeating += output.finish_reason == "repetition"

    def cells(self, name: str) -> list[str]:
        rest = [self.repeating, round(self.tokens / max(1, self.asked))]
        return [name, f"{self.right} of {self.asked}", f"{self.endless} of {self.asked}", *map(str, rest)]


HEADINGS: Final = ["weights", "right", "no end within 300 tokens", "ended as repeating", "tokens of an answer, mean"]


def greedy_marks(llm: Any) -> Marks:
    """The likeliest tokens, and no stop on repetition: what the weights alone make of the questions."""
    from baton.llm import SamplingParams

    return ask(llm, [SamplingParams(temperature=0.0, max_tokens=TOKENS_MAX, stop_on_repetition=False)])


def shipped_marks(llm: Any, draws: int) -> Marks:
    """As a user gets them: sampling and stop on repetition are the defaults of the model. Seeds are fixed."""
    from baton.llm import SamplingParams

    return ask(llm, [SamplingParams(max_tokens=TOKENS_MAX, seed=seed) for seed in range(draws)])


def ask(llm: Any, params: Sequence[Any]) -> Marks:
    """Every question once for each of `params` (SamplingParams)."""
    marks = Marks()
    chats = [[{"role": "user", "content": question.text}] for question in QUESTIONS]
    for each in params:
        for question, answer in zip(QUESTIONS, llm.chat(chats, each), strict=True):
            for output in answer.outputs:
                marks.add(question, output)
    return marks
