"""Hugging Face folders, the text any client may send, and equality with transformers where it is installed."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidConfig
from baton.text.tokenizer import Tokenizer

VARIED = [
    "",
    "Hello, world!",
    "def f(x):\n\treturn [i ** 2 for i in x]  # squares\n\n\n",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀",
    "你好，世界。日本語 한국어",
    "e\u0301 a\u0308 \u0301alone",
    "a" + " " * 50 + "b\n\n\n\t\t \r\n",
    "1234567890 3.14159 ½ ② ٣",
    "<|end|> <|start|> <|im_end|> </s>",
    "long " * 5_000,
]
HOSTILE = ["\ud800", "a\udfffb", "\x00", "\ufeffx", "\x00" * 10_000, "\uffff\U0010ffff", "\ud83d\ude00", "'" * 5000]


@pytest.fixture(params=["byte_level", "sentencepiece", "smollm2"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", VARIED, ids=lambda text: ascii(text[:12]))
def test_decode_undoes_encode(tokenizer, text):
    for parse_special in (False, True):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
        if tokenizer.strips_leading_space and parse_special and "</s>" in text:
            continue  # a SentencePiece text begins anew after a special token, with another space
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_decode_undoes_encode_for_any_text(byte_level, sentencepiece, text):
    assert byte_level.decode(byte_level.encode(text, add_special_tokens=False)) == text
    # U+2581 is how SentencePiece writes a space: a text that has it comes back with a space, with any library.
    expected = text.replace("\u2581", " ")
    assert sentencepiece.decode(sentencepiece.encode(text, add_special_tokens=False)) == expected


def test_smollm2_has_no_token_for_some_bytes(smollm2):
    """Bytes that no text of its training had, such as 0xF1, are left out, as llama.cpp does: not our choice."""
    held = {smollm2.id_to_bytes(i) for i in range(smollm2.vocab_size)}
    assert bytes([0xF1]) not in held
    assert smollm2.decode(smollm2.encode("a\U00040000b")) == "a\ufffd\ufffd\ufffdb"


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_hostile_text_is_encoded(tokenizer, text):
    expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize("unit", ["a", " ", "9", "\ud800"], ids=ascii)
def test_a_long_run_of_one_character_is_encoded(tokenizer, unit):
    text = unit * (250_000 // len(unit.encode("utf-8", "surrogatepass")))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text.replace("\ud800", "\ufffd")


def test_special_tokens_are_parsed_only_when_asked(byte_level):
    assert byte_level.encode("<|end|>", add_special_tokens=False, parse_special=True) == [1]
    plain = byte_level.encode("<|end|>", add_special_tokens=False)
    assert not set(plain) & byte_level.special_ids
    assert byte_level.decode(plain) == "<|end|>"


def test_a_clients_text_never_becomes_a_special_token(tokenizer):
    for special_id in sorted(tokenizer.special_ids):
        text = "x" + tokenizer.token_text(special_id) + "y"
        assert not set(tokenizer.encode(text, add_special_tokens=False)) & tokenizer.special_ids


def test_facts_of_a_folder(byte_level):
    assert byte_level.bos_id == 0
    assert byte_level.eos_ids == (1, 7)
    assert byte_level.special_ids == {0, 1}
    assert byte_level.encode("a")[0] == 0
    assert byte_level.encode("a", add_special_tokens=False)[0] != 0
    assert byte_level.vocab_size == max(byte_level.encode("<tool é>", add_special_tokens=False)) + 1
    assert repr(byte_level) == "<Tokenizer 401 tokens, 2 special, eos [1, 7]>"


def test_bytes_of_a_token(byte_level, sentencepiece):
    assert byte_level.id_to_bytes(1) == b"<|end|>"
    assert byte_level.id_to_bytes(byte_level.vocab_size - 1) == "<tool é>".encode()
    assert b"".join(map(byte_level.id_to_bytes, byte_level.encode(" né", add_special_tokens=False))) == " né".encode()
    assert sentencepiece.id_to_bytes(3 + 0xE4) == b"\xe4"


@pytest.mark.parametrize("token_id", [-1, -(2**63), 401, 2**31, 2**63, 10**30])
def test_an_id_without_a_token_is_nothing(byte_level, token_id):
    assert byte_level.id_to_bytes(token_id) == b""
    assert byte_level.decode([token_id]) == ""


def test_skipping_special_tokens(byte_level):
    ids = byte_level.encode("hi<|end|>", parse_special=True)
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|start|>hi<|end|>"


# --- Folders ----------------------------------------------------------------------------------------------------------


def changed(folder, tmp_path, name, **changes):
    """A copy of the folder with some keys of one of its files changed."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
    (copy / name).write_text(json.dumps({**content, **changes}))
    return copy


def test_settings_overrule_the_post_processor(byte_level_folder, tmp_path):
    folder = changed(byte_level_folder, tmp_path, "tokenizer_config.json", add_bos_token=False, add_eos_token=True)
    ids = Tokenizer.from_path(folder).encode("a")
    assert ids[0] != 0
    assert ids[-1] == 1


def test_special_tokens_map_is_read_where_the_config_is_silent(byte_level_folder, tmp_path):
    folder = changed(byte_level_folder, tmp_path, "special_tokens_map.json", bos_token="<|start|>", eos_token="<|end|>")
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.from_path(folder).eos_ids == (1, 7)
    assert Tokenizer.from_path(folder).bos_id == 0


def test_eos_falls_back_to_the_model_config(byte_level_folder, tmp_path):
    folder = changed(byte_level_folder, tmp_path, "config.json", eos_token_id=9)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_path(folder).eos_ids == (1, 9)


def test_tokens_added_in_the_config(byte_level_folder, tmp_path):
    added = {"401": {"content": "<|new|>", "special": True}}
    folder = changed(byte_level_folder, tmp_path, "tokenizer_config.json", added_tokens_decoder=added)
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.encode("<|new|>", add_special_tokens=False, parse_special=True) == [401]
    assert 401 in tokenizer.special_ids


def test_an_added_token_may_take_the_spaces_around_it(byte_level_folder, tmp_path):
    def ids(text, **flags):
        added = {"401": {"content": "<|new|>", "special": True, **flags}}
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        folder = changed(byte_level_folder, place, "tokenizer_config.json", added_tokens_decoder=added)
        return Tokenizer.from_path(folder).encode(text, add_special_tokens=False, parse_special=True)

    assert ids("a  <|new|>", lstrip=True) == ids("a<|new|>")
    assert ids("<|new|>  a", rstrip=True) == ids("<|new|>a")
    assert ids("a  <|new|>") != ids("a<|new|>")


def test_special_tokens_are_looked_for_the_longest_first(byte_level_folder, tmp_path):
    """One may begin with another."""
    names = ("<|new|>", "<|new|>er", "<|n", "<|new")
    added = {str(401 + place): {"content": name, "special": True} for place, name in enumerate(names)}
    folder = changed(byte_level_folder, tmp_path, "tokenizer_config.json", added_tokens_decoder=added)
    texts = Tokenizer.from_path(folder).special_texts
    assert [text for text in texts if text in names] == ["<|new|>er", "<|new|>", "<|new", "<|n"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("tokenizer.json", {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "BPEDecoder"),
        ("tokenizer.json", {"decoder": None}, "no decoder"),
        ("tokenizer.json", {"model": {"type": "Nonsense"}}, "cannot read"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": [True]}, "eos_token_id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<|x|>"}}}, "do not belong together"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": "y"}}, "added_tokens_decoder"),
    ],
)
def test_a_folder_we_cannot_read_exactly_is_refused(byte_level_folder, tmp_path, name, changes, words):
    with pytest.raises(InvalidConfig, match=words):
        Tokenizer.from_path(changed(byte_level_folder, tmp_path, name, **changes))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InvalidConfig, match=r"no tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    with pytest.raises(InvalidConfig, match="no model at"):
        Tokenizer.from_path(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(InvalidConfig, match="JSON"):
        Tokenizer.from_path(tmp_path)


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(byte_level_folder):
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(byte_level_folder / "tokenizer.json"), bos_token="<|start|>", eos_token="<|end|>"
    )


@pytest.mark.parametrize("text", VARIED, ids=lambda text: ascii(text[:12]))
def test_equals_transformers(byte_level, theirs, text):
    for special in (False, True):
        ids = byte_level.encode(text, add_special_tokens=special, parse_special=True)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (False, True):
            assert byte_level.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=30), skip=st.booleans())
def test_decodes_any_ids_as_transformers_does(byte_level, theirs, ids, skip):
    assert byte_level.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
