"""Guesses of the tokens of a forced text, which drafts are made of."""

from collections.abc import Callable

from baton.grammar import vocabulary as module
from baton.grammar.vocabulary import Vocabulary

TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b"<end>", b"", b'{"', b'": "']
END, WIDTH = 257, 261


def guessing(encode: Callable[[str], list[int]] | None = None) -> Vocabulary:
    return Vocabulary(TOKENS, [END], WIDTH, encode)


def test_without_a_tokenizer_the_longest_tokens_come_first():
    assert guessing().guess(b'{"ab": "c') == [259, 256, 260, ord("c")]


def test_a_text_is_guessed_as_the_tokenizer_writes_it():
    """The longest token is not always the tokenizer's: it merges in an order of its own."""
    assert guessing(lambda text: list(text.encode())).guess(b"abc") == list(b"abc")


def test_what_the_tokenizer_would_change_is_not_its_guess():
    """Some begin every text with a space, and a special token is no text."""
    for encode in (lambda text: list(f" {text}".encode()), lambda text: [END], lambda text: [WIDTH + 5]):
        assert guessing(encode).guess(b"abc") == [256, ord("c")]


def test_a_text_may_end_within_a_character_and_be_long():
    texts: list[str] = []
    one = guessing(lambda text: texts.append(text) or list(text.encode()))
    assert one.guess("ab\u00e9".encode()[:-1]) == list(b"ab")
    assert len(one.guess(b"x" * 100_000)) == module.GUESS_TEXT_MAX
    assert max(map(len, texts)) == module.GUESS_TEXT_MAX


def test_guesses_are_cached_and_bounded(monkeypatch):
    monkeypatch.setattr(module, "GUESSES_MAX", 3)
    texts: list[str] = []
    one = guessing(lambda text: texts.append(text) or list(text.encode()))
    for text in (b"a", b"b", b"a", b"b", b"c", b"d", b"a"):
        assert one.guess(text) == list(text)
        assert len(one._guesses) <= 3
    assert texts == ["a", "b", "c", "d", "a"]
