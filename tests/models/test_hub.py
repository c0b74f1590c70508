"""Models of the hub: which file a name means, revisions, what is here without the hub, and how it is removed.

The hub is a fake one on loopback; its client is the real one.
"""

from __future__ import annotations

import json
import struct
import sys

import pytest
from fake_hub import FakeHub, fake_hub

from baton.cli.models import hub_models
from baton.cli.rm import remove_model
from baton.cli.say import Failed
from baton.errors import ModelNotFound, ModelUnsupported
from baton.models.download import Listener
from baton.models.hub import HubName, chosen_gguf, hub_name, quant_of
from baton.models.names import resolve
from baton.models.support import GGUF_HEAD_BYTES, refuse_unsupported

GGUF = b"GGUF" + (3).to_bytes(4, "little")
GGUFS = {
    "tiny-Q4_K_M.gguf": GGUF + b"four", "tiny-q8_0.gguf": GGUF + b"eight", "mmproj-tiny-f16.gguf": GGUF + b"eyes",
    "README.md": b"read",
}  # fmt: skip
LLAMA = b'{"architectures": ["LlamaForCausalLM"]}'
FOLDER = {
    "config.json": LLAMA, "model.safetensors": b"weights", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again", "original/consolidated.safetensors": b"and again", "modeling.py": b"print()",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with fake_hub() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}")
        yield made


@pytest.fixture
def unplug(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    def no_answer(*_: object) -> None:
        raise ConnectionError

    return lambda: monkeypatch.setattr(hub, "answer", no_answer)


def test_a_gguf_file_by_its_quantisation(hub: FakeHub):
    hub.add("own/tiny-GGUF", GGUFS)
    path = resolve("own/tiny-GGUF:Q8_0")
    assert path.name == "tiny-q8_0.gguf"
    assert path.read_bytes() == GGUF + b"eight"
    assert hub.sent == ["tiny-q8_0.gguf"], "nothing else is fetched"
    assert resolve("hf.co/own/tiny-GGUF:q8_0") == path
    assert hub.sent == ["tiny-q8_0.gguf"], "and only once"
    assert resolve("own/tiny-GGUF").name == "tiny-Q4_K_M.gguf", "the usual one, where none is named"
    assert resolve("own/tiny-GGUF:tiny-Q4_K_M.gguf").name == "tiny-Q4_K_M.gguf"


def test_a_folder_without_what_is_not_needed(hub: FakeHub):
    hub.add("own/tiny", FOLDER)
    folder = resolve("own/tiny")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_router_downloads_no_weights_and_an_instance_beside_it_does(hub: FakeHub, unplug):
    hub.add("own/tiny", FOLDER)
    folder = resolve("own/tiny", weights=False)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert "model.safetensors" not in hub.sent
    assert not hub_models(), "nothing that could be served"
    assert resolve("own/tiny") == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    hub.add("own/other", {**FOLDER, "config.json": LLAMA + b" "})
    other = resolve("own/other", weights=False)
    unplug()
    assert resolve("own/other", weights=False) == other, "the router starts without the hub"
    with pytest.raises(ModelNotFound, match="did not give it"):
        resolve("own/other")


def test_how_embeddings_are_pooled_is_fetched_too(hub: FakeHub):
    """It lies in a folder of its own, as sentence-transformers writes it."""
    pooling = {"modules.json": b"[]", "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}'}
    hub.add("own/embedding", {**FOLDER, **pooling})
    folder = resolve("own/embedding")
    assert (folder / "1_Pooling" / "config.json").read_bytes() == pooling["1_Pooling/config.json"]
    assert (folder / "modules.json").is_file()


def test_a_revision_is_fetched_and_kept_apart(hub: FakeHub):
    old = hub.add("own/tiny-GGUF", {"a-Q4_0.gguf": GGUF + b"old"}, "v1")
    hub.add("own/tiny-GGUF", {"a-Q4_0.gguf": GGUF + b"new"})
    assert resolve("own/tiny-GGUF:Q4_0").read_bytes() == GGUF + b"new"
    for name, revision in (("own/tiny-GGUF:Q4_0@v1", ""), ("own/tiny-GGUF:Q4_0", "v1"), ("own/tiny-GGUF:Q4_0", old)):
        assert resolve(name, revision=revision).read_bytes() == GGUF + b"old"
    with pytest.raises(ModelNotFound, match=r"own/tiny-GGUF:Q4_0@v2.*did not give it"):
        resolve("own/tiny-GGUF:Q4_0", revision="v2")


def test_a_revision_of_what_has_none_is_refused(tmp_path):
    for name in ("smollm2", str(tmp_path), "own/tiny@v1"):
        with pytest.raises(ModelNotFound, match=r"a revision \(v2\) is of a Hugging Face id"):
            resolve(name, revision="v2")


def test_what_is_here_is_used_where_the_hub_does_not_answer(hub: FakeHub, unplug):
    hub.add("own/tiny-GGUF", GGUFS)
    hub.add("own/tiny", FOLDER)
    here = [resolve("own/tiny-GGUF:Q8_0"), resolve("own/tiny")]
    unplug()
    assert [resolve("own/tiny-GGUF:Q8_0"), resolve("own/tiny")] == here
    assert resolve("own/tiny-GGUF") == here[0], "the only one that is here"
    for name in ("own/tiny-GGUF:Q5_0", "own/tiny@v1", "own/other"):
        with pytest.raises(ModelNotFound, match="did not give it"):
            resolve(name)


def test_what_is_here_is_used_without_the_hub_s_library(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    hub.add("own/tiny-GGUF", GGUFS)
    here = resolve("own/tiny-GGUF:Q8_0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert resolve("own/tiny-GGUF:Q8_0") == here


# What cannot run here


WEIGHTS = bytes(1 << 20)
UNSUPPORTED = {
    "Gemma": ({"architectures": ["Gemma2ForCausalLM"]}, "architecture Gemma2ForCausalLM is not supported"),
    "MPNet": ({"architectures": ["MPNetModel"]}, "architecture MPNetModel is not supported"),
    "bitsandbytes": (
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "bitsandbytes"}},
        r"the weights are quantised \(bitsandbytes\)",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_folder_is_refused_before_its_weights_are_downloaded(hub: FakeHub, kind: str):
    config, why = UNSUPPORTED[kind]
    hub.add("own/other", {"config.json": json.dumps(config).encode(), "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"})
    with pytest.raises(ModelUnsupported, match=f"own/other: config.json: {why}.*weights were not downloaded"):
        resolve("own/other")
    assert hub.sent == ["config.json"]
    assert hub.bytes_sent < 1000


def gguf_of(architecture: str, **numbers: int) -> bytes:
    """The head of a file as converters write it: settings first, then a vocabulary, then tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    pairs = [string("general.architecture") + struct.pack("<I", 8) + string(architecture)]
    pairs += [string(f"{architecture}.{name}") + struct.pack("<II", 4, number) for name, number in numbers.items()]
    words = b"".join(string("word") for _ in range(10_000))
    pairs.append(string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 10_000) + words)
    return GGUF + struct.pack("<QQ", 0, len(pairs)) + b"".join(pairs) + WEIGHTS


@pytest.mark.parametrize("knows_ranges", [True, False])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (gguf_of("gemma2"), "architecture gemma2 is not supported"),
        (gguf_of("mamba", expert_count=8), "architecture mamba is not supported"),
    ],
)
def test_an_unsupported_gguf_file_is_refused_by_its_first_bytes(hub: FakeHub, content: bytes, why: str, knows_ranges: bool):
    hub.knows_ranges = knows_ranges
    hub.add("own/other-GGUF", {"other-Q4_K_M.gguf": content})
    with pytest.raises(ModelUnsupported, match=f"{why}.*weights were not downloaded"):
        resolve("own/other-GGUF")
    assert (hub.sent, hub.ranges) == ([], ["other-Q4_K_M.gguf"])
    if knows_ranges:  # else the system's buffers take what the client never reads
        assert hub.bytes_sent == GGUF_HEAD_BYTES


def test_a_supported_gguf_file_is_fetched_whole(hub: FakeHub):
    content = gguf_of("llama")
    hub.add("own/tiny-GGUF", {"tiny-Q4_K_M.gguf": content})
    assert resolve("own/tiny-GGUF").read_bytes() == content
    refuse_unsupported(resolve("own/tiny-GGUF"))


def test_a_download_is_announced_with_its_size_and_counted(hub: FakeHub):
    """Once: what is here already is not announced."""
    hub.add("own/tiny", {**FOLDER, "model.safetensors": bytes(3_000_000)})
    hub.chunk_bytes, hub.chunk_seconds = 500_000, 0.1
    said: list[str] = []
    seen: list[tuple[int, int]] = []
    listener = Listener(said.append, lambda done, total: seen.append((done, total)))
    resolve("own/tiny", listener=listener)
    total = 3_000_000 + len(LLAMA) + len(b"{}")
    assert said == ["downloading own/tiny (3 MB)"]
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    assert any(0 < done < total for done, _ in seen), seen
    assert seen == sorted(seen)
    resolve("own/tiny", listener=listener)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("o/r:Q5_0", list(GGUFS), "no file is Q5_0; there are Q4_K_M, Q8_0"),
        ("o/r:Q4_K_M", ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "name one of them: o/r:a-Q4_K_M.gguf, o/r:b-Q4_K_M.gguf"),
        ("o/r:Q4_K_M", ["README.md"], "there is no .gguf file in o/r"),
        ("o/r", ["README.md"], "neither safetensors with a config.json nor a .gguf file"),
        ("o/r", ["a-Q5_0.gguf", "a-Q6_K.gguf"], "no file is Q4_K_M; there are Q5_0, Q6_K"),
        ("o/r:Q4_XS", ["a-IQ4_XS.gguf"], "no file is Q4_XS; there are IQ4_XS"),
        ("o/r:Q6_K", ["a-Q6_K-00001-of-00002.gguf", "a-Q6_K-00002-of-00002.gguf"], "in 2 parts"),
    ],
)
def test_a_name_that_means_no_file_or_several_says_what_there_is(name: str, files: list[str], why: str):
    found = hub_name(name)
    assert found is not None
    with pytest.raises((ModelNotFound, ModelUnsupported), match=why):
        chosen_gguf(found, files)


def test_names():
    assert hub_name("o/r:Q4_0@refs/pr/1") == HubName("o/r", "Q4_0", "refs/pr/1")
    assert hub_name("https://huggingface.co/o/r") == HubName("o/r")
    assert str(HubName("o/r", "Q4_0", "v1")) == "o/r:Q4_0@v1"
    for text in ("r", "a/b/c", "../r", "o/r.gguf", "o/r@../../etc", "o/r:", "o/r@", "o /r"):
        assert hub_name(text) is None, text
    assert [quant_of(f"x/Tiny-{end}.gguf") for end in ("Q4_K_M", "iq4_xs", "UD-Q4_K_XL", "F16")] == [
        "Q4_K_M", "IQ4_XS", "Q4_K_XL", "F16",
    ]  # fmt: skip
    assert quant_of("model.gguf") == "model.gguf"


class TestRemoving:
    def test_one_file_of_several(self, hub: FakeHub):
        hub.add("own/tiny-GGUF", GGUFS)
        kept, gone = resolve("own/tiny-GGUF:Q4_K_M"), resolve("own/tiny-GGUF:Q8_0")
        blob = gone.resolve()
        assert [row["name"] for row in hub_models()] == ["own/tiny-GGUF:Q4_K_M", "own/tiny-GGUF:Q8_0"]
        assert remove_model("own/tiny-GGUF:q8_0") >= len(GGUF + b"eight")
        assert not gone.exists()
        assert not blob.exists()
        assert kept.read_bytes() == GGUF + b"four"
        assert [row["name"] for row in hub_models()] == ["own/tiny-GGUF:Q4_K_M"]

    def test_one_revision_and_what_another_shares_stays(self, hub: FakeHub):
        hub.add("own/tiny", FOLDER, "v1")
        hub.add("own/tiny", {**FOLDER, "config.json": LLAMA + b"\n"})
        old, new = resolve("own/tiny@v1"), resolve("own/tiny")
        assert [row["name"] for row in hub_models()] in (["own/tiny", "own/tiny@v1"], ["own/tiny@v1", "own/tiny"])
        assert remove_model("own/tiny@v1") > 0
        assert not old.exists()
        assert [path.name for path in (new.parent.parent / "refs").rglob("*")] == ["main"], "none that means nothing"
        assert (new / "model.safetensors").read_bytes() == b"weights"
        with pytest.raises(Failed, match="is not here"):
            remove_model("own/tiny@v1")

    def test_all_of_a_repository(self, hub: FakeHub, tmp_path):
        hub.add("own/tiny", FOLDER)
        hub.add("own/other", FOLDER)
        resolve("own/tiny")
        resolve("own/other")
        remove_model("own/tiny")
        assert [row["name"] for row in hub_models()] == ["own/other"]
        assert [path.name for path in (tmp_path / "hub").glob("models--*")] == ["models--own--other"]

    def test_an_alias(self, monkeypatch: pytest.MonkeyPatch, tmp_path):
        from baton.models.aliases import ALIASES, cache_folder

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        file = cache_folder() / ALIASES["smollm2"].file
        file.parent.mkdir(parents=True)
        file.write_bytes(b"123")
        assert remove_model("smollm2") == 3
        assert not file.exists()
        with pytest.raises(Failed, match="is not here"):
            remove_model("smollm2")

    def test_a_file_of_one_s_own_is_never_removed(self, tmp_path):
        (tmp_path / "mine.gguf").write_bytes(b"mine")
        for name in (str(tmp_path / "mine.gguf"), str(tmp_path), "..", "own/not-here"):
            with pytest.raises(Failed):
                remove_model(name)
        assert (tmp_path / "mine.gguf").exists()
