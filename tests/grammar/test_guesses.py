"""Guesses of the tokens of a forced text, which drafts are made of."""

from collections.abc import Callable

from baton.grammar import vocabulary as module
from baton.grammar.expected_text import Expected
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


def test_tokens_of_an_expected_text_are_those_that_are_the_same_whatever_follows():
    tokens = [*(bytes([byte]) for byte in range(128)), b"<end>", b'":', b' "', b" t", b" f", b'"x']
    one = Vocabulary(tokens, [128], len(tokens))
    assert one.guess_expected(Expected(b'a":', (b" true", b" false"))) == [ord("a"), 129]
    assert one.guess_expected(Expected(b'a": "', (b"x", b"1"))) == [ord("a"), 129, 130]
    assert one.guess_expected(Expected(b'a:"', (b"x", b"1"))) == [ord("a"), ord(":")], "a token of the model joins it with an x"
    assert one.guess_expected(Expected(b'a:"', (b"1",))) == [ord("a"), ord(":"), ord('"')]
    assert one.guess_expected(Expected(b"ab", is_last=True)) == [ord("a"), ord("b")]
    assert one.guess_expected(Expected(b"ab")) == [ord("a")], "what follows is not known"
    assert one.guess_expected(Expected(b"ab", (b"1",), is_cut=True)) == [ord("a")]
    assert one.guess_expected(Expected(b"", (b"1",))) == []


def test_tokens_that_the_model_wrote_before_lead_as_far_as_they_are_the_expected_text():
    one = guessing()
    expected = Expected(b"abc", (b"1",))
    assert one.leading(expected, [ord("a"), ord("b"), ord("x")]) == ([ord("a"), ord("b")], Expected(b"c", (b"1",)))
    assert one.leading(expected, [256, ord("c"), ord("1")]) == ([256, ord("c")], Expected(b"", (b"1",)))
    assert one.leading(expected, [END, ord("a")]) == ([], expected), "a special token has no text"
    assert one.leading(expected, [258, ord("a")]) == ([], expected), "nor has an empty one"
    assert one.leading(expected, [WIDTH + 1]) == ([], expected)
