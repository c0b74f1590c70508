"""Makes any Python string encodable as UTF-8, as the tokenizer requires."""

from __future__ import annotations


def has_lone_surrogate(text: str) -> bool:
    """Whether `text` has no UTF-8 form. JSON allows such a string: `"\\ud800"`."""
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def replace_lone_surrogates(text: str) -> str:
    """The text with U+FFFD for each surrogate without a partner; a pair becomes its character."""
    if not has_lone_surrogate(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
