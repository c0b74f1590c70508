"""Tokenizers that encoders come with: WordPiece and Unigram. The oracle is the tokenizers library with its own truncation."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from baton.errors import CallerError
from baton.text.tokenizer import Tokenizer, longest_first

sys.path.append(str(Path(__file__).parent.parent / "models"))
tiny_encoders = pytest.importorskip("tiny_encoders", reason="the models of encoders come from transformers")

KINDS = {"word_piece": tiny_encoders.word_piece, "unigram": tiny_encoders.unigram}
WORDS = ["the", "baton", "runners", "passing", "a", "stick", "until", "xyz", "?", "short."]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory) -> tuple[Tokenizer, Backend]:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = KINDS[request.param]()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_path(folder), backend


def text_of(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def test_ids_are_those_of_the_library(pair):
    ours, theirs = pair
    for seed in range(20):
        text = text_of(random.Random(seed), seed)
        assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("most", [5, 6, 7, 12, 31, 200])
def test_pairs_are_joined_and_cut_as_the_library_does_it(pair, most):
    ours, theirs = pair
    theirs = Backend.from_str(theirs.to_str())
    theirs.enable_truncation(most, strategy="longest_first")
    for seed in range(40):
        rng = random.Random(seed)
        one, other = (text_of(rng, rng.choice((0, 1, 3, 9, 40))) for _ in range(2))
        if most - theirs.num_special_tokens_to_add(True) < 2:
            with pytest.raises(CallerError):
                ours.encode_pair(one, other, most)
        else:
            assert ours.encode_pair(one, other, most) == theirs.encode(one, other).ids


def test_a_second_text_may_be_cut_by_itself(pair):
    ours, theirs = pair
    whole = ours.encode_pair("the baton", text_of(random.Random(1), 30), 500, second_max=4)
    assert len(whole) == len(ours.encode("the baton", add_special_tokens=False)) + 4 + theirs.num_special_tokens_to_add(True)


def test_special_tokens_in_a_text_of_a_pair_are_plain_characters(tmp_path):
    """Of WordPiece, whose models tell both texts apart by the separator. (A Unigram vocabulary has its special tokens as
    ordinary pieces, too; its models have no token types.)"""
    tiny_encoders.word_piece().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_path(tmp_path).encode_pair("a [SEP] b", "the [SEP] stick", 100).count(3) == 2


def test_the_beginning_of_a_long_text_is_that_of_the_whole(pair):
    ours, theirs = pair
    for text in (text_of(random.Random(3), 20_000), "runners" * 20_000, " " * 50_000 + "baton stick", ""):
        whole = theirs.encode(text, add_special_tokens=False).ids
        for most in (1, 10, 300):
            assert ours.encode_beginning(text, most) == whole[:most]


def test_a_long_text_is_not_tokenised_as_a_whole(pair, monkeypatch):
    """A document of megabytes is cut to 512 tokens in the time of its beginning."""
    from baton.text import tokenizer as module

    ours, seen = pair[0], []
    cut = module._cut
    monkeypatch.setattr(module, "_cut", lambda backend, text: seen.append(len(text)) or cut(backend, text))
    assert len(ours.encode_beginning("the baton " * 500_000, 512)) == 512
    assert seen == [16 * (512 + 64)]


@given(first=st.integers(0, 60), second=st.integers(0, 60), room=st.integers(2, 60))
def test_longest_first_takes_single_tokens_from_the_longer_text(first, second, room):
    """Transformers' definition: one token at a time, from the longer text; from the first where both are equal."""
    found = longest_first(first, second, room)
    left = [first, second]
    while sum(left) > room:
        left[left[1] > left[0]] -= 1
    assert sum(found) == sum(left)
    assert max(abs(found[0] - left[0]), abs(found[1] - left[1])) <= 1  # an odd token goes to the longer one


def test_texts_of_word_pieces(tmp_path):
    tiny_encoders.word_piece().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    ours = Tokenizer.from_path(tmp_path)
    ids = ours.encode("The runners passing sticks")
    assert (ids[0], ids[-1]) == (2, 3)
    assert ours.decode(ids) == "the runners passing sticks"
    assert (ours.prefix_ids, ours.suffix_ids) == ((2,), (3,))


def test_texts_of_unigrams(tmp_path):
    tiny_encoders.unigram().save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_path(tmp_path)
    assert ours.decode(ours.encode("the runner passes a stick")) == "the runner passes a stick"
    assert (ours.prefix_ids, ours.suffix_ids) == ((0,), (2,))
