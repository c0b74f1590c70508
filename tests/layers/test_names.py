"""Names and sentences of the source: no class name has two meanings, and sentences have a subject."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from .rules import SRC, nodes, sources

SHARED_CLASSES = {"SamplingParams": "vLLM's name in `LLM`; the engine's is resolved from it"}


def test_no_class_name_has_two_meanings():
    places = defaultdict(list)
    for path in sources():
        for name in re.findall(r"^\s*class (\w+)", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(SRC)))
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_CLASSES}


NO_SUBJECT = re.compile(r"(What|Of|So|Those|Its|It)\b")
HIDDEN_SUBJECT = re.compile(r"\b(nobody|somebody|told|heard|(stands|stood) still)\b", re.IGNORECASE)


def without_subject(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, also of fields, that open without a subject."""
    if not re.search(rf"\"{NO_SUBJECT.pattern}", source):
        return
    strings = [node.value for node in nodes(source) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    for string in strings:
        if isinstance(string.value, str) and NO_SUBJECT.match(string.value):
            yield string.lineno, string.value


def with_hidden_subject(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, messages and comments that hide a subject. A string without a space is a name."""
    if not HIDDEN_SUBJECT.search(source):
        return
    texts = [(node.lineno, node.value) for node in nodes(source) if isinstance(node, ast.Constant)]
    texts += [(number, line[line.index("#") :]) for number, line in enumerate(source.splitlines(), 1) if "# " in line]
    for number, text in texts:
        if isinstance(text, str) and " " in text and HIDDEN_SUBJECT.search(text):
            yield number, text


def test_sentences_have_a_subject():
    """CONTRIBUTING.md, "Write a sentence": a docstring opens with its subject, and the subject is not hidden."""
    found = []
    for path in sources():
        source = path.read_text()
        lines = [*without_subject(source), *with_hidden_subject(source)]
        found += [f"{path.relative_to(SRC)}:{number}: {text[:60]}" for number, text in lines]
    assert not found


@pytest.mark.parametrize(
    "planted", [*map(repr, ("Its name.", "it stands still", "Of two ranks.")), "# somebody waits", 'f"{x} was told"']
)
def test_a_sentence_without_a_subject_is_found(planted):
    source = planted.replace("'", '"')
    assert [*without_subject(source), *with_hidden_subject(source)]


NO_NOUN = re.compile(rf"({NO_SUBJECT.pattern}|(From|Until|Between|Asked|As|How|The same|That|This)\b)")


def help_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the help texts of metrics: sentences that are arguments, or entries of a table of metrics."""
    for node in nodes(source):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call):
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Tuple):
            parts = node.elts
        elif isinstance(node, ast.Assign):
            parts = [node.value]
        for part in parts:
            if (
                isinstance(part, ast.Constant)
                and isinstance(part.value, str)
                and " " in part.value
                and part.value.endswith(".")
            ):
                yield part.lineno, part.value


def test_help_texts_of_metrics_open_with_a_noun():
    """A dashboard shows a help text alone: "Prompt tokens per request.", not "Of a request."."""
    found = [(path.name, *help_text) for path in sources("observe") for help_text in help_texts(path.read_text())]
    assert not [each for each in found if NO_NOUN.match(each[2])]


def test_help_texts_are_found():
    found = [text for path in sources("observe") for _, text in help_texts(path.read_text())]
    assert len(found) > 80
    assert {"Prompt tokens per request.", "Completed steps."} <= {*found}
    planted = [text for _, text in help_texts('histogram("x", "From its admission to its first token.", [1])')]
    assert [text for text in planted if NO_NOUN.match(text)]


PRIVATE_WORDS = frozenset(
    ("told", "tell", "tells", "heard", "hear", "hears", "seat", "seats", "looked", "somebody", "nobody", "anybody", "everybody")
)
PRIVATE_NAMES: dict[str, str] = {}
"""Allowed names with such words, each with the reason."""


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of functions, classes and attributes whose words say nothing about their meaning."""
    if not re.search("|".join((*PRIVATE_WORDS, "look_at")), source, re.IGNORECASE):
        return
    for node in nodes(source):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}
        if name not in PRIVATE_NAMES and (words & PRIVATE_WORDS or "look_at" in name):
            yield node.lineno, name


def test_names_are_the_words_of_the_field():
    """STYLE: a name tells what happens (`record_alive`, `next_pass`), not that somebody hears, tells or looks."""
    assert not [
        f"{path.relative_to(SRC)}:{line}: {name}" for path in sources() for line, name in private_names(path.read_text())
    ]


@pytest.mark.parametrize(
    "planted", ["def hear(x): ...", "class Seat: ...", "self._told = 1", "look_at: int = 0", "def _look_at_x(): ..."]
)
def test_a_private_name_is_found(planted):
    assert [*private_names(planted)]


def test_comments_of_the_kernels_have_a_subject():
    paths = sorted((SRC / "native" / "csrc").glob("*.[ch]"))
    found = [
        (path.name, found.group()) for path in paths for found in re.finditer(rf"/\* {NO_SUBJECT.pattern}.*", path.read_text())
    ]
    assert paths
    assert not found
