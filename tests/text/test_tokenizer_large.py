"""Large texts: the ids of the library's plain way, without the interpreter lock, and no more work than the caller can use."""

from __future__ import annotations

import threading

import pytest

from baton.text.tokenizer import Tokenizer, TooManyTokens

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "def f(x):\n\treturn [i ** 2 for i in x]  # squares\n\n\n",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u0301alone 你好，世界。日本語 한국어",
    "<|end|> <|start|> <|im_end|><|im_start|>user\nhi</s> <s>",
    "a" + " " * 5000 + "b\n\n\n\t\t \r\n" + "0123456789" * 400,
    "long words and " * 4000,
    "\x00\ufeff\uffff" * 300,
    "'" * 3000,
]


@pytest.fixture(params=["byte_level", "sentencepiece", "smollm2"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", CORPUS, ids=lambda text: ascii(text[:12]))
@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_are_those_of_the_librarys_plain_way(tokenizer, text, parse_special):
    backend = tokenizer._parts.backend if parse_special else tokenizer._plain_backend()
    expected = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special) == expected
    if parse_special:
        assert tokenizer.encode_words([text, text]) == [expected, expected]


def test_other_threads_run_while_a_large_text_is_cut(smollm2):
    """`encode` of the library keeps the lock: one 7.8 MB text stopped everybody's stream for 12 s."""
    turns, over, seen = [0], threading.Event(), []

    def count() -> None:
        while not over.wait(0.001):
            turns[0] += 1

    def cut() -> None:
        before = turns[0]
        smollm2.encode("many words to cut into tokens " * 20_000, parse_special=True)
        seen.append(turns[0] - before)
        over.set()

    threads = [threading.Thread(target=work) for work in (count, cut)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert seen[0] > 20


@pytest.mark.parametrize("text", CORPUS, ids=lambda text: ascii(text[:12]))
def test_a_bound_refuses_exactly_what_has_more_tokens(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    for bound in sorted({1, 3, max(1, len(ids) - 1), max(1, len(ids)), len(ids) + 1, 5000}):
        if len(ids) <= bound:
            assert tokenizer.encode(text, add_special_tokens=False, parse_special=True, tokens_max=bound) == ids
        else:
            with pytest.raises(TooManyTokens) as error:
                tokenizer.encode(text, parse_special=True, tokens_max=bound)
            assert bound / 2 < error.value.tokens_at_least <= len(ids)


def test_most_of_a_text_that_is_far_too_long_is_never_looked_at(smollm2, monkeypatch):
    cut = []
    from baton.text import tokenizer as module

    plain = module._cut
    monkeypatch.setattr(module, "_cut", lambda backend, text: cut.append(len(text)) or plain(backend, text))
    with pytest.raises(TooManyTokens):
        smollm2.encode("some words " * 500_000, parse_special=True, tokens_max=1000)
    assert sum(cut) == 16_000
