"""Makes any Python string one that UTF-8, and so the tokenizer, can take."""

from __future__ import annotations


def has_lone_surrogate(text: str) -> bool:
    """True where `text` has no UTF-8 form. JSON lets a client write such a string: `"\\ud800"`."""
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def replace_lone_surrogates(text: str) -> str:
    """The same text with U+FFFD for each surrogate without a partner; two that form a pair become their character."""
    if not has_lone_surrogate(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
