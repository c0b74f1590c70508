"""Names and sentences of the source: no class name has two meanings, and sentences have a subject."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from .rules import SRC, _parsed, sources

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
    strings = [
        node.value for node in ast.walk(_parsed(source)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    for string in strings:
        if isinstance(string.value, str) and NO_SUBJECT.match(string.value):
            yield string.lineno, string.value


def with_hidden_subject(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, messages and comments that hide a subject. A string without a space is a name."""
    if not HIDDEN_SUBJECT.search(source):
        return
    texts = [(node.lineno, node.value) for node in ast.walk(_parsed(source)) if isinstance(node, ast.Constant)]
    texts += [(number, line[line.index("#") :]) for number, line in enumerate(source.splitlines(), 1) if "# " in line]
    for number, text in texts:
        if isinstance(text, str) and " " in text and HIDDEN_SUBJECT.search(text):
            yield number, text


@pytest.mark.parametrize("layer", sorted({path.relative_to(SRC).parts[0] for path in sources()}))
def test_sentences_have_a_subject(layer):
    """CONTRIBUTING.md, "Write a sentence": a docstring opens with its subject, and the subject is not hidden."""
    found = []
    for path in [path for path in sources() if path.relative_to(SRC).parts[0] == layer]:
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


@pytest.mark.parametrize("path", sorted((SRC / "native" / "csrc").glob("*.[ch]")), ids=lambda path: path.name)
def test_comments_of_the_kernels_have_a_subject(path):
    assert not re.findall(rf"/\* {NO_SUBJECT.pattern}.*", path.read_text())
