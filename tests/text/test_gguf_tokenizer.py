"""Tokenizers from GGUF: equal to llama.cpp's ids, to the Hugging Face folder of the same model, to naive oracles."""

from __future__ import annotations

import itertools
import json
import struct
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidConfig, ModelLoadError
from baton.gguf import read_gguf_metadata
from baton.text.gguf_tokenizer import tokenizer_parts_from_gguf
from baton.text.tokenizer import Tokenizer

LLAMA_CPP = json.loads((Path(__file__).parent / "data" / "llama_cpp_ids.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_gguf):
    return read_gguf_metadata(smollm2_gguf)


def built(metadata, **changes) -> Tokenizer:
    named = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer(tokenizer_parts_from_gguf({**metadata, **named}))


@pytest.fixture(scope="module")
def cutting(smollm2_metadata):
    """SmolLM2's tokenizer with another way to cut texts into words: each is built once."""
    return cache(lambda pre: built(smollm2_metadata, pre=pre))


@pytest.mark.parametrize("pre", LLAMA_CPP["ids"])
def test_equals_the_ids_of_llama_cpp(cutting, pre):
    tokenizer = cutting(pre)
    known, first = LLAMA_CPP["ids"][pre], LLAMA_CPP["ids"]["smollm"]
    for text, ids, default in zip(LLAMA_CPP["texts"], known, [*first, *[None] * (len(known) - len(first))], strict=False):
        if pre == "qwen2" and unicodedata.normalize("NFC", text) != text:
            continue  # Qwen's own tokenizer composes characters and llama.cpp does not; we follow Qwen
        plain, special = (ids or default)[0], (ids or default)[-1]
        assert tokenizer.encode(text, add_special_tokens=False) == plain
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=True) == special


def test_qwen_s_composes_characters_and_others_do_not(cutting):
    for pre, same in (("qwen2", True), ("deepseek-r1-qwen", True), ("smollm", False), ("llama-bpe", False)):
        tokenizer = cutting(pre)
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) is same


def test_every_kind_of_end_ends_a_sequence(smollm2_metadata):
    """Of the text, of a turn, of a message (which calls a tool): each once, the end of the text first."""
    ends = {"eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 6}
    assert built(smollm2_metadata, **ends).eos_ids == (2, 5, 6)
    assert built(smollm2_metadata, **{**ends, "eom_token_id": 2}).eos_ids == (2, 5)


def test_facts_of_smollm2(smollm2):
    assert smollm2.vocab_size == 49_152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == (2,)
    assert smollm2.special_ids == set(range(17))
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.encode("Hello") == [19556]  # no begin-of-text: add_bos_token is false


def naive_byte_bpe(word: str, ids: dict[str, int], rank: dict[tuple[str, str], int], alphabet: dict[int, str]) -> list[int]:
    """Merges the best pair, the leftmost first, until none is left."""
    parts = [alphabet[byte] for byte in word.encode()]
    while True:
        pairs = [(rank[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in rank]
        if not pairs:
            return [ids[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def smollm2_tables(smollm2, smollm2_metadata):
    """Id of a piece, rank of a merge, piece of a byte."""
    ids = {piece: i for i, piece in enumerate(smollm2_metadata["tokenizer.ggml.tokens"])}
    rank = {tuple(m.split(" ")): n for n, m in enumerate(smollm2_metadata["tokenizer.ggml.merges"])}
    alphabet = {smollm2.id_to_bytes(i)[0]: p for p, i in ids.items() if len(p) == 1}
    return ids, rank, alphabet


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(text=st.text(st.one_of(st.sampled_from("abc the 012\n\t'sé漢😀_"), st.characters(codec="utf-8")), max_size=40))
def test_equals_a_naive_bpe(smollm2, smollm2_tables, text):
    regex = pytest.importorskip("regex", reason="the oracle cuts words with the regex package")
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids, rank, alphabet = smollm2_tables
    if set(text.encode()) - set(alphabet):
        return  # SmolLM2 has no token for some bytes that no text of its training had
    chunks = [chunk for chunk in regex.split(r"(\p{N})", text) if chunk]
    expected = [
        i for chunk in chunks for word in regex.findall(words, chunk) for i in naive_byte_bpe(word, ids, rank, alphabet)
    ]
    assert smollm2.encode(text, add_special_tokens=False) == expected


def test_the_same_model_as_folder_and_as_gguf(byte_level, byte_level_folder):
    model = json.loads((byte_level_folder / "tokenizer.json").read_text())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    from_gguf = built(
        {},
        model="gpt2",
        pre="gpt-2",
        tokens=[*pieces, "<tool é>"],
        token_type=[3, 3, *[1] * (len(pieces) - 2), 4],
        merges=[" ".join(pair) for pair in model["merges"]],
        bos_token_id=0,
        eos_token_id=1,
        eot_token_id=7,
        add_bos_token=True,
    )
    assert from_gguf.eos_ids == byte_level.eos_ids
    assert [from_gguf.id_to_bytes(i) for i in range(401)] == [byte_level.id_to_bytes(i) for i in range(401)]
    for text in LLAMA_CPP["texts"]:
        for parse in (False, True):
            assert from_gguf.encode(text, parse_special=parse) == byte_level.encode(text, parse_special=parse)


def test_llama3_takes_a_whole_word_where_no_merges_lead_to_it():
    bare = {"model": "gpt2", "tokens": ["a", "b", "c", "ab", "abc"], "merges": ["a b"]}
    assert built({}, pre="llama-bpe", **bare).encode("abc") == [4]
    assert built({}, pre="gpt-2", **bare).encode("abc") == [3, 2]


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def naive_sentencepiece(text: str, pieces: list[str], types: list[int], scores: list[float]) -> list[int]:
    """Merges the neighbours whose concatenation has the best score, the leftmost first; bytes for what is left over."""
    score = {piece: s for piece, kind, s in zip(pieces, types, scores, strict=True) if kind in (1, 4, 5)}
    ids = {piece: i for i, piece in enumerate(pieces)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(-score[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not joined:
            break
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [[ids[part]] if part in score else [ids[f"<0x{byte:02X}>"] for byte in part.encode()] for part in parts]
    return [i for group in known for i in group]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(text=st.text(st.one_of(st.sampled_from("the and dog\n()漢😀"), st.characters(codec="utf-8")), max_size=40))
@example(text="The quick brown fox jumps over the lazy dog. It's 12 o'clock, and we've 3.14 apples!")
@example(text="def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n")
@example(text="the then there these those  and   and    and")
def test_sentencepiece_equals_a_naive_one(sentencepiece, sentencepiece_metadata, text):
    keys = ("tokens", "token_type", "scores")
    expected = naive_sentencepiece(text, *(sentencepiece_metadata[f"tokenizer.ggml.{key}"] for key in keys))
    assert sentencepiece.encode(text, add_special_tokens=False) == expected


def test_sentencepiece_control_tokens(sentencepiece):
    assert sentencepiece.encode("the")[0] == 1
    assert sentencepiece.encode("</s>", add_special_tokens=False, parse_special=True) == [2]
    assert 2 not in sentencepiece.encode("</s>", add_special_tokens=False)
    assert 1 not in sentencepiece.encode("a<s>", add_special_tokens=False)
    assert 3 + 0x41 not in sentencepiece.encode("<0x41>", add_special_tokens=False)
    assert sentencepiece.decode(sentencepiece.encode("<0x41>")) == "<0x41>"


def test_sentencepiece_without_a_space_first(sentencepiece_metadata):
    tokenizer = built(sentencepiece_metadata, add_space_prefix=False)
    ids = tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(ids) == " the"


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": None}, "no tokenizer"),
        ({"model": "gpt2", "pre": "viking"}, "'viking'"),
        ({"model": "gpt2", "pre": "gpt-2"}, "no merges"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["nospace"]}, "space between"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["no such"]}, "do not fit"),
        ({"tokens": []}, "no tokens"),
        ({"tokens": "abc"}, "not a list"),
        ({"token_type": [1]}, "1 token types"),
        ({"scores": [1.0]}, "1 scores"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"eos_token_id": "2"}, "type str"),
    ],
)
def test_a_gguf_we_cannot_build_exactly_is_refused(sentencepiece_metadata, changes, words):
    with pytest.raises(InvalidConfig, match=words):
        built(sentencepiece_metadata, **changes)


# --- The file itself --------------------------------------------------------------------------------------------------


def gguf_file(path: Path, write=lambda writer: None) -> Path:
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files")
    writer = gguf.GGUFWriter(path, "llama")
    write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_type_of_metadata_is_read(tmp_path):
    def write(writer):
        writer.add_string("s", "né\x00")
        writer.add_bool("b", True)
        writer.add_int8("i8", -5)
        writer.add_uint64("u64", 2**63)
        writer.add_float32("f", 0.5)
        writer.add_array("strings", ["a", "", "😀"])
        writer.add_array("numbers", [1, -2, 3])

    metadata = read_gguf_metadata(gguf_file(tmp_path / "m.gguf", write))
    wanted = {
        "s": "né\x00",
        "b": True,
        "i8": -5,
        "u64": 2**63,
        "f": 0.5,
        "strings": ["a", "", "😀"],
        "numbers": [1, -2, 3],
    }
    assert {key: metadata[key] for key in wanted} == wanted


def test_every_cut_of_a_file_is_refused_and_none_crashes(tmp_path):
    whole = gguf_file(tmp_path / "m.gguf", lambda writer: writer.add_array("x", ["a", "bc"])).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            read_gguf_metadata(cut)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a GGUF"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 2**62), "type 9"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "UTF-8"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, words):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=words):
        read_gguf_metadata(tmp_path / "m.gguf")
