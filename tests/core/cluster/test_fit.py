"""A refusal names every part in which an instance differs from the cluster."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.cluster.fit import WORDS, disagreement
from baton.protocol.instance import Build

from .harness import hello

PARTS = dict.fromkeys(WORDS, "same")
ALL = {
    "weights": "weights 12ab instead of same",
    "model": "model config 12ab instead of same",
    "quantization": "quantisation 12ab instead of same",
    "weight_types": "types of weights 12ab instead of same",
    "adapter": "adapter 12ab instead of same",
    "dtype": "data type of activations 12ab instead of same",
    "kernels": "kernels 12ab instead of same",
    "kv_dtype": "KV data type 12ab instead of same",
    "block_size": "block size 12ab instead of same",
    "layout": "KV layout 12ab instead of same",
    "tp_size": "tensor parallel size 12ab instead of same",
}
"""Each part of the identity alone, and the words for it."""


def with_parts(name: str, parts: dict[str, str], **changes: object):
    identity = str(sorted(parts.items())).encode()
    return hello(name, identity=identity, identity_parts=parts, **changes)


def refusal(mine: dict[str, str], theirs: dict[str, str] = PARTS) -> str:
    return disagreement(with_parts("new", mine), with_parts("old", theirs))


def test_the_table_has_every_part():
    assert ALL.keys() == WORDS.keys()


def test_every_field_of_an_identity_has_a_word():
    identity = pytest.importorskip("baton.worker.identity", reason="needs the models' packages")
    assert {*identity.KVIdentity.__dataclass_fields__} <= WORDS.keys()


@pytest.mark.parametrize("part", ALL)
def test_a_part_that_differs_is_named_with_both_values(part: str):
    assert refusal({**PARTS, part: "12ab"}) == f"new does not fit old: {ALL[part]}; all instances of a cluster must agree"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 7}, "block size 7 instead of 4"),
        ({"vocab_size": 7}, "vocabulary 7 instead of 1000"),
        ({"model_context_tokens": 7}, "context of the model 7 instead of 0"),
        ({"layout": b"other"}, "KV layout 6f74686572 instead of 6c"),
    ],
)
def test_a_shape_that_differs_is_named_with_both_values(change: dict[str, object], words: str):
    assert words in disagreement(hello("new", **change), hello("old"))


def test_unequal_ranks_are_refused_by_their_sizes_not_by_the_layout_that_follows():
    one, two = {**PARTS, "tp_size": "1", "layout": "aa"}, {**PARTS, "tp_size": "2", "layout": "bb"}
    text = disagreement(with_parts("new", two, layout=b"half"), with_parts("old", one))
    assert text.startswith("new does not fit old: tensor parallel size 2 instead of 1; ")


def test_all_parts_that_differ_are_named():
    text = refusal({**PARTS, "weights": "12ab", "kernels": "avx2", "dtype": "bfloat16"})
    for words in ("weights 12ab instead of same", "kernels avx2 instead of same", "activations bfloat16 instead of same"):
        assert words in text
    assert "quantisation" not in text


@pytest.mark.parametrize("cause", ["kv_dtype", "block_size", "model"])
def test_a_digest_is_not_named_beside_its_cause(cause: str):
    text = refusal({**PARTS, cause: "other", "layout": "12ab", "quantization": "int8", "weight_types": "34cd"})
    assert ALL[cause].replace("12ab", "other") in text
    assert "quantisation int8 instead of same" in text
    assert "KV layout" not in text
    assert "types of weights" not in text


@pytest.mark.parametrize(
    ("mine", "theirs"), [({"weights": "12"}, {}), ({}, {"weights": "12"}), ({"new_part": "1"}, {"old": "1"})]
)
def test_instances_that_send_no_common_parts_are_told_apart_by_their_digests(mine: dict[str, str], theirs: dict[str, str]):
    digests = [str(sorted(parts.items())).encode().hex()[:16] for parts in (mine, theirs)]
    assert f"identity {digests[0]} instead of {digests[1]}" in refusal(mine, theirs)


def test_a_part_of_a_later_version_is_named_as_it_is():
    assert "group_size 64 instead of 32" in refusal({**PARTS, "group_size": "64"}, {**PARTS, "group_size": "32"})


def test_layouts_that_begin_alike_differ():
    assert "KV layout" in disagreement(hello("new", layout=b"12345678a"), hello("old", layout=b"12345678b"))


def test_builds_are_named_where_they_differ():
    new, old = (
        replace(with_parts(name, {**PARTS, "kernels": name}), build=Build(version, "abc")) for name, version in VERSIONS
    )
    assert disagreement(new, old).endswith("must agree (its build is 0.3.0 abc, the other's 0.2.0 abc)")


VERSIONS = (("new", "0.3.0"), ("old", "0.2.0"))


def test_equal_ones_of_different_builds_fit():
    new, old = (replace(with_parts(name, PARTS), build=Build(version)) for name, version in VERSIONS)
    assert disagreement(new, old) == ""
