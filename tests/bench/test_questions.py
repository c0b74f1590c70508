"""The held questions are judged by whole words, and endless answers are told from those that were ended."""

from dataclasses import dataclass, field

import pytest

import questions
from questions import QUESTIONS, Marks, Question


@dataclass
class Output:
    text: str
    finish_reason: str = "stop"
    token_ids: list[int] = field(default_factory=lambda: [1, 2])


@pytest.mark.parametrize(
    ("answer", "right"),
    [("It is Rome.", True), ("ROME", True), ("Roman", False), ("chrome", False), ("", False), ("Rome, which", True)],
)
def test_an_answer_is_right_where_it_has_the_word_as_a_word(answer, right):
    assert Question("What is the capital of Italy?", ("rome",)).is_answered_by(answer) is right


def test_numbers_are_words_too():
    seven = Question("How many days?", ("7", "seven"))
    assert seven.is_answered_by("There are 7.")
    assert not seven.is_answered_by("There are 17, or 70.")


def test_there_are_twenty_and_no_question_answers_itself():
    assert len({question.text for question in QUESTIONS}) == 20
    assert not [
        question.text for question in QUESTIONS if question.is_answered_by(question.text) and question.accepted != ("a",)
    ]


def test_ends_are_counted_by_what_ended_them():
    marks, question = Marks(), QUESTIONS[0]
    for output in (Output("Rome"), Output("Rome Rome", "length"), Output("no", "repetition"), Output("no")):
        marks.add(question, output)
    assert (marks.asked, marks.right, marks.endless, marks.repeating, len(marks.wrong)) == (4, 2, 1, 1, 2)
    assert marks.cells("int8") == ["int8", "2 of 4", "1 of 4", "1", "2"]


def test_every_question_is_asked_once_for_each_draw():
    class Model:
        def chat(self, chats, params):
            return [type("Answer", (), {"outputs": [Output(chat[-1]["content"])]}) for chat in chats]

    marks = questions.shipped_marks(Model(), 3)
    assert marks.asked == 60
