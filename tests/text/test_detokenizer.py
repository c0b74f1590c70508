"""Incremental text equals the text of the whole, for any ids and any cut; row 68 of the bad inputs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.text.detokenizer import Detokenizer

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)


def streamed(tokenizer, ids, sizes, **options):
    """Pushes the ids in groups of the given sizes, then one by one. Returns all deltas."""
    detokenizer, at, deltas = Detokenizer(tokenizer, **options), 0, []
    for size in [*sizes, *[1] * len(ids)]:
        group = ids[at : at + size]
        deltas.append(detokenizer.push_one(group[0]) if size == 1 and group else detokenizer.push(group))
        at += size
    return [*deltas, detokenizer.flush()]


def check(tokenizer, ids, sizes, skip, start):
    whole = tokenizer.decode(ids, skip_special_tokens=skip, at_text_start=start)
    deltas = streamed(tokenizer, ids, sizes, skip_special_tokens=skip, at_text_start=start)
    assert "".join(deltas) == whole
    # A delta is whole characters: an incomplete one may show as U+FFFD only where the complete text has it too.
    assert sum(delta.count("\ufffd") for delta in deltas) == whole.count("\ufffd")


options = (st.lists(st.integers(0, 5), max_size=5), st.booleans(), st.booleans())


@relaxed
@given(st.lists(st.integers(-3, 420), max_size=40), *options)
def test_any_ids_byte_level(byte_level, ids, sizes, skip, start):
    check(byte_level, ids, sizes, skip, start)


@relaxed
@given(st.lists(st.one_of(st.integers(0, 450), st.integers(3, 258)), max_size=40), *options)
def test_any_ids_sentencepiece(sentencepiece, ids, sizes, skip, start):
    check(sentencepiece, ids, sizes, skip, start)


@relaxed
@given(st.text(max_size=40), *options)
def test_any_text_sentencepiece(sentencepiece, text, sizes, skip, start):
    check(sentencepiece, sentencepiece.encode(text), sizes, skip, start)


@relaxed
@given(st.lists(st.integers(0, 49_200), max_size=60), *options)
def test_any_ids_smollm2(smollm2, ids, sizes, skip, start):
    check(smollm2, ids, sizes, skip, start)


@pytest.mark.parametrize("text", ["你好", "😀", "né", "👩‍👩‍👧"])
def test_a_character_comes_out_whole(byte_level, text):
    deltas = streamed(byte_level, byte_level.encode(text, add_special_tokens=False), [])
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


def test_the_end_inside_a_character_is_one_replacement_character(byte_level):
    ids = byte_level.encode("a😀", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.holds_back
    assert detokenizer.flush() == "\ufffd"
    assert byte_level.decode(ids) == "a\ufffd"


def test_a_special_token_in_the_middle_of_a_character(byte_level):
    head, tail = (
        byte_level.encode("😀", add_special_tokens=False)[:2],
        byte_level.encode("😀", add_special_tokens=False)[2:],
    )
    assert "".join(streamed(byte_level, [*head, 1, *tail], [])) == "😀"
    assert "<|end|>" in "".join(streamed(byte_level, [*head, 1, *tail], [], skip_special_tokens=False))


def test_leading_space_goes_only_at_the_start_of_a_text(sentencepiece):
    ids = sentencepiece.encode("the dog", add_special_tokens=False)
    assert "".join(streamed(sentencepiece, ids, [])) == "the dog"
    assert "".join(streamed(sentencepiece, ids, [], at_text_start=False)) == " the dog"


def test_work_per_token_does_not_grow(byte_level):
    """Counted, not timed: each push asks for the bytes of its own tokens only."""
    asked = []

    class Counted:
        strips_leading_space = False

        def bytes_of(self, ids, *, skip_special_tokens, shown_ids):
            asked.append(len(ids))
            return byte_level.bytes_of(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counted())
    for token_id in byte_level.encode("the quick 😀 " * 500):
        detokenizer.push([token_id])
    assert set(asked) == {1}
