"""Options of other engines: every row of every table, on the command line, in a file and as a keyword of `LLM`."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from test_settings import given_by

from baton.cli.say import Failed
from baton.cli.settings import read_config
from baton.config import ServeConfig
from baton.config.schema import GROUPS, all_settings
from baton.errors import InvalidConfig
from baton.familiar import ALIASES, BY_ALIAS, ENGINES, ENVIRONMENT, FOREIGN, FORMER, SHORT, VALUES, environment_lines
from baton.familiar.rows import Row
from baton.llm.keywords import serve_settings
from baton.ranges import refusal

FIELDS = {field.name for field in fields(ServeConfig)}
SETTINGS = {setting.name: setting for setting in all_settings()}
ROWS = [pytest.param(row, id=f"{engine}-{row.name}") for engine, rows in ENGINES.items() for row in rows]
KINDS = ("same", "alias", "not needed", "only", "instead", "several")
OF_KIND = {kind: [row for row in ROWS if row.values[0].kind == kind] for kind in KINDS}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_at_least_thirty_options(engine):
    assert len({row.name for row in ENGINES[engine]}) >= 30


def typed(name: str, value) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, str(value)]


def in_file(tmp_path, name, value):
    file = tmp_path / "serve.yaml"
    file.write_text(f"{name}: {json.dumps(value)}\n")
    return file


DRAFT_MODELS = ("speculative_model", "speculative_draft_model_path", "model_draft", "hf_repo_draft")


def example(row: Row) -> tuple[object, object]:
    """A value as that engine's users write it, and what it is here."""
    setting = SETTINGS[row.setting]
    special = {
        "kv_cache_memory_bytes": ("3Gi", 3.0),
        "cache_ram": (2048, 2.0),
        "root_path": ("/x", "/x"),
        "api_prefix": ("/x", "/x"),
        "alias": ("mine", ("mine",)),
        "origins": ("https://a", ("https://a",)),
        "ssl_keyfile": None,
        **dict.fromkeys(DRAFT_MODELS, ("small", "draft:small")),
    }
    if row.name in special and special[row.name] is not None:
        return special[row.name]
    if setting.choices:
        theirs, ours = next(iter(VALUES.get(setting.name, {}).items()), (setting.choices[-1], setting.choices[-1]))
        return theirs, ours
    value = {bool: not setting.default, int: 7, float: 0.75, str: "x", list[str]: "a"}[setting.kind]
    return value, (value,) if setting.kind == list[str] else value


NEEDS_OTHERS = ("ssl_keyfile", "ssl_ca_certs")
"""Settings that are refused alone: test_settings.py gives them with the others."""


HONOURED = [row for row in OF_KIND["same"] + OF_KIND["alias"] if row.values[0].setting not in NEEDS_OTHERS]


@pytest.mark.parametrize("row", HONOURED)
def test_what_is_honoured(row: Row, tmp_path):
    value, ours = example(row)
    expected = ServeConfig(**{row.setting: ours})
    assert given_by(typed(row.name, value)) == expected
    assert read_config({"config": in_file(tmp_path, row.name, value)}) == expected
    if row.setting == "model":
        with pytest.raises(InvalidConfig, match="first argument"):
            serve_settings({row.name: value})
    else:
        assert ServeConfig(**serve_settings({row.name: value})) == expected


@pytest.mark.parametrize("row", OF_KIND["not needed"])
def test_what_is_not_needed_is_accepted_with_a_line(row: Row, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    value = True if row.flag else row.values[0] if row.values else 7
    words = f"is not needed here: {row.words}"
    assert given_by(typed(row.name, value)) == ServeConfig()
    assert f"{typed(row.name, value)[0]} {words}" in capsys.readouterr().err
    file = in_file(tmp_path, row.name, value)
    assert read_config({"config": file}) == ServeConfig()
    assert f"{file}: {row.name} {words}" in capsys.readouterr().err
    assert serve_settings({row.name: value}) == {}
    assert f"{row.name} {words}" in caplog.text


@pytest.mark.parametrize("row", OF_KIND["only"])
def test_what_has_one_value_here_is_refused_with_another(row: Row, tmp_path):
    for value in row.only:
        assert given_by(typed(row.name, value)) == ServeConfig()
        assert read_config({"config": in_file(tmp_path, row.name, value)}) == ServeConfig()
        assert serve_settings({row.name: value}) == {}
    refused_everywhere(row, "2", tmp_path)


@pytest.mark.parametrize("row", OF_KIND["instead"])
def test_what_is_called_otherwise_or_missing_is_refused_in_words(row: Row, tmp_path):
    refused_everywhere(row, True if row.flag else "4", tmp_path)
    for nothing in (False,) if row.flag else row.nothing[1:2]:
        assert given_by(typed(row.name, nothing)) == ServeConfig(), "asks for nothing"


@pytest.mark.parametrize("row", OF_KIND["several"])
def test_what_is_several_settings_is_taken_apart(row: Row, tmp_path):
    value = {"model": "small", "num_speculative_tokens": 3}
    expected = ServeConfig(speculate="draft:small", speculative_tokens=3)
    assert given_by(typed(row.name, json.dumps(value))) == expected
    assert read_config({"config": in_file(tmp_path, row.name, value)}) == expected
    assert ServeConfig(**serve_settings({row.name: value})) == expected


def refused_everywhere(row: Row, value, tmp_path):
    with pytest.raises(Failed, match=f"^--{row.name.replace('_', '-')} .*{re.escape(row.words)}"):
        given_by(typed(row.name, value))
    with pytest.raises(Failed, match=f"serve.yaml: {row.name} .*{re.escape(row.words)}"):
        read_config({"config": in_file(tmp_path, row.name, value)})
    with pytest.raises(InvalidConfig, match=f"^{row.name} .*{re.escape(row.words)}"):
        serve_settings({row.name: value})


def test_an_option_that_two_engines_have_gets_one_answer():
    rows: dict[str, list[Row]] = {}
    for each in ENGINES.values():
        for row in each:
            rows.setdefault(row.name, []).append(row)
    for them in rows.values():
        assert len({(row.kind, row.setting, row.words, row.only, row.flag, row.nothing) for row in them}) == 1, them


def test_no_name_means_two_things():
    same = {row.name for rows in ENGINES.values() for row in rows if row.kind == "same"}
    assert same <= FIELDS
    assert not FIELDS & {*BY_ALIAS, *FOREIGN}
    assert not {*BY_ALIAS} & {*FOREIGN}
    assert {*ALIASES} <= FIELDS
    letters = [short for shorts in SHORT.values() for short in shorts]
    assert len(letters) == len(set(letters))
    flags = {name for name in FIELDS if SETTINGS[name].kind is bool} | {name for name, row in FOREIGN.items() if row.flag}
    assert not {f"no_{name}" for name in flags} & {*FIELDS, *BY_ALIAS, *FOREIGN}, "--no-x is the other side of --x"


def test_words_name_options_that_exist():
    texts = [row.words for row in FOREIGN.values()] + [*ENVIRONMENT.values()]
    others = {"--mixed", "--plain"}  # of other commands
    for flag in {flag for text in texts for flag in re.findall(r"--[a-z-]+", text)} - others:
        name = flag[2:].replace("-", "_")
        assert name in FIELDS or name.removeprefix("no_") in FIELDS, flag


@pytest.mark.parametrize(("setting", "words"), VALUES.items())
def test_other_words_for_a_value_are_values_here(setting, words):
    for theirs, ours in words.items():
        assert refusal(ServeConfig, setting, ours) == ""
        assert refusal(ServeConfig, setting, theirs), "it would be taken anyway"


@pytest.mark.parametrize("setting", FORMER)
def test_former_names_are_taken_for_ever(setting):
    for former in FORMER[setting]:
        kind = SETTINGS[setting].kind
        value = {bool: False, int: 7, float: 0.5}.get(kind, "float32")
        assert getattr(given_by(typed(former, value)), setting) == value
        assert serve_settings({former: value}) == {setting: value}
        with pytest.raises(Failed, match="same setting"):
            read_config({setting: value, former: value})


def test_errors_name_the_option_as_it_was_typed(tmp_path):
    with pytest.raises(Failed, match=r"^--num-ctx is 1: it must be a whole number from 2"):
        read_config({"num_ctx": 1})
    with pytest.raises(Failed, match=r"serve.yaml: slots is 0"):
        read_config({"config": in_file(tmp_path, "slots", 0)})


def test_half_is_taken_and_said(capsys):
    for word in ("half", "float16"):
        assert given_by(["--dtype", word]) == ServeConfig()
        assert f"--dtype {word}: float16 is not computed in here" in capsys.readouterr().err
        assert serve_settings({"dtype": word}) == {"dtype": "auto"}


def test_letters_of_llama_cpp():
    config = given_by(["-m", "some.gguf", "-c", "4096", "-np", "3", "-t", "2", "-a", "mine", "-ngl", "99"])
    assert (config.model, config.max_model_len, config.max_num_seqs, config.threads) == ("some.gguf", 4096, 3, 2)
    assert config.served_model_name == ("mine",)
    assert given_by(["-c", "0", "-ctk", "q8_0", "-ctv", "q8_0"]) == ServeConfig(kv_cache_dtype="int8")
    with pytest.raises(Failed, match="same setting"):
        given_by(["-ctk", "q8_0", "-ctv", "f16"])


def test_an_older_llama_cpp_has_a_bare_fa():
    for value in ([], ["on"], ["auto"], ["0"]):
        assert given_by(["-m", "some.gguf", "-fa", *value, "-ngl", "99"]).model == "some.gguf"
    assert given_by(["-fa", "some.gguf"]).model == "some.gguf"
    assert given_by(["some.gguf", "--flash-attn"]).model == "some.gguf"


@pytest.mark.parametrize(
    "words",
    [
        ["some", "--served-model-name", "a", "b", "--port", "1"],
        ["--served-model-name", "a", "b", "--port", "1", "--model", "some"],
        ["--served-model-name", "a", "--served_model_name", "b", "--port", "1", "some"],
        ["--served-model-name", "a", "some", "--port", "1", "--served-model-name", "b"],  # no list: the model is nowhere else
    ],
)
def test_names_as_the_list_of_vllm(words):
    config = given_by(words)
    assert (config.model, config.served_model_name, config.port) == ("some", ("a", "b"), 1)


def test_a_converted_value_is_refused_with_the_typed_one():
    with pytest.raises(Failed, match=r"^--cache-ram -1, as --kv-host-gib, is -0\.0009765625: it must be from 0 to"):
        given_by(["--cache-ram", "-1"])


def test_keywords_of_llm_take_what_the_command_line_takes():
    assert serve_settings({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}) == {"kv_cache_dtype": "int8"}
    with pytest.raises(InvalidConfig, match="kv_cache_dtype is given twice, the second time as cache_type_v"):
        serve_settings({"cache_type_k": "q8_0", "cache_type_v": "f16"})
    assert serve_settings({"no_stop_on_repetition": True}) == {"stop_on_repetition": False}
    with pytest.raises(InvalidConfig, match=r"kv_dtipe is no setting of LLM; did you mean kv_cache_dtype\?"):
        serve_settings({"kv_dtipe": "int8"})


def test_underscores_as_vllm_takes_them():
    assert given_by(["--max_model_len", "100", "--max_num_seqs=3"]) == ServeConfig(max_model_len=100, max_num_seqs=3)


def test_a_flag_may_be_switched_off_in_a_file(tmp_path):
    assert read_config({"config": in_file(tmp_path, "no_enable_prefix_caching", True)}) == ServeConfig(
        enable_prefix_caching=False
    )
    assert read_config({"config": in_file(tmp_path, "no_webui", True)}) == ServeConfig(chat_page=False)
    assert serve_settings({"no_mmap": True, "no_enable_prefix_caching": True}) == {"enable_prefix_caching": False}


def test_variables_of_other_engines_are_not_read_and_said(monkeypatch, capsys):
    monkeypatch.setenv("OLLAMA_NUM_PARALLEL", "4")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "4096")
    assert read_config({}) == ServeConfig()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "baton: LLAMA_ARG_CTX_SIZE is not read; use --max-model-len",
        "baton: OLLAMA_NUM_PARALLEL is not read; use --max-num-seqs",
    ]
    assert read_config({}, quiet=True) == ServeConfig()
    assert capsys.readouterr().err == ""
    assert environment_lines({}) == []


def test_groups_name_no_setting_that_does_not_exist():
    from baton.cli.cluster_options import PlacementOptions, RayOptions, RouterOptions, UpOptions

    owners = (ServeConfig, UpOptions, RayOptions, RouterOptions, PlacementOptions)
    known = {setting.name for owner in owners for setting in all_settings(owner)}
    assert {name for names in GROUPS.values() for name in names} == known
