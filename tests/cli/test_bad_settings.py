"""Bad settings are refused in one line that names the setting and what is allowed, before anything is fetched or started."""

from __future__ import annotations

import json
import math
from typing import Literal, get_origin

import pytest
from command_rig import baton_here, said

from baton.cli.say import Failed
from baton.cli.settings import read_config
from baton.config import ServeConfig, WorkerConfig
from baton.config.schema import all_settings
from baton.errors import InvalidConfig
from baton.llm import LLM
from baton.ranges import allowed_values

ALLOWED = allowed_values(ServeConfig)
NUMBERS = [name for name, allowed in ALLOWED.items() if allowed.kind in (int, float)]


def outside(name):
    bounds, whole = ALLOWED[name].bounds, ALLOWED[name].kind is int
    below = bounds.low - 1 if whole or not bounds.above else bounds.low
    return [below, bounds.high + 1, math.nan, math.inf, -math.inf, True, "7"]


def inside(name):
    bounds, whole = ALLOWED[name].bounds, ALLOWED[name].kind is int
    return [(int if whole else float)(bounds.high), bounds.low + 1e-9 if bounds.above else bounds.low]


def test_every_number_has_a_range():
    assert NUMBERS
    assert [name for name in NUMBERS if ALLOWED[name].bounds is None] == []


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_outside_their_range_are_refused(name):
    for value in outside(name):
        with pytest.raises(InvalidConfig) as wrong:
            ServeConfig(**{name: value})
        assert str(wrong.value).startswith(f"{name} is {value!r}: it must be ")
        assert str(ALLOWED[name].bounds) in str(wrong.value)
    beside = {"drain_seconds_max": inside("drain_seconds_max")[0]} if name == "shutdown_delay" else {}  # which it is a part of
    for value in inside(name):
        assert getattr(ServeConfig(**beside, **{name: value}), name) == value


@pytest.mark.parametrize("name", NUMBERS)
def test_the_command_line_names_the_flag_and_the_file_its_key(name, tmp_path):
    value = outside(name)[0]
    flag = "--" + name.replace("_", "-")
    with pytest.raises(Failed, match=f"^{flag} is .*: it must be "):
        read_config({name: value})
    file = tmp_path / "serve.yaml"
    file.write_text(f"{name}: {json.dumps(value)}\n")
    with pytest.raises(Failed, match=f"serve.yaml: {name} is .*: it must be "):
        read_config({"config": file})


@pytest.mark.parametrize("name", [name for name, allowed in ALLOWED.items() if not allowed.optional and name in NUMBERS])
def test_a_number_that_must_be_there_is_not_none(name):
    with pytest.raises(InvalidConfig, match=f"{name} is None"):
        ServeConfig(**{name: None})


def test_the_worker_has_the_same_ranges():
    """It is made by LLM and by tests too, not only from a ServeConfig."""
    theirs = allowed_values(WorkerConfig)
    shared = {name: name for name in ("threads", "kv_memory_gib", "block_size")}
    shared |= {"max_model_len": "context_tokens_max", "gpu_memory_utilization": "memory_utilization"}
    assert {name: theirs[inner] for name, inner in shared.items()} == {name: ALLOWED[name] for name in shared}
    assert theirs["slots"].bounds == ALLOWED["max_num_seqs"].bounds
    assert theirs["tokens_per_step"].bounds == ALLOWED["max_num_batched_tokens"].bounds
    with pytest.raises(InvalidConfig, match="threads is -5"):
        WorkerConfig(threads=-5)


def test_llm_refuses_bad_settings_before_it_looks_for_the_model():
    with pytest.raises(InvalidConfig, match="threads is -5"):
        LLM("no-such-model", threads=-5)


@pytest.mark.parametrize("name", [name for name, allowed in ALLOWED.items() if get_origin(allowed.kind) is Literal])
def test_a_word_that_is_none_of_the_choices_is_refused(name):
    with pytest.raises(InvalidConfig, match="must be one of"):
        ServeConfig(**{name: "something else"})


@pytest.mark.parametrize("key", ["", " ", "qx qx", " qx", "qx\n", "sch\u00fcssel", "\x7f", "q" * 1025])
def test_unusable_keys_are_refused_and_not_repeated(key):
    with pytest.raises(Failed) as wrong:
        read_config({"api_key": ["good", key]})
    assert str(wrong.value).startswith("--api-key 2 of 2 must be 1 to 1,024 printable ASCII characters without spaces")
    assert "q" not in str(wrong.value)
    assert "sch" not in str(wrong.value)


@pytest.mark.parametrize("name", ["model", "host", "served_model_name"])
def test_empty_names_are_refused(name):
    with pytest.raises(Failed, match="--" + name.replace("_", "-")):
        read_config({name: " "})


NO_TEMPLATE = "/nonexistent.jinja"
REFUSED = {
    "an unset shell variable as a key": (["--api-key", ""], "--api-key 1 of 1 must be"),
    "a key with an umlaut": (["--api-key", "schl\u00fcssel"], "--api-key 1 of 1 must be"),
    "no room for a prompt": (["--max-model-len", "1"], "--max-model-len is 1: it must be a whole number from 2"),
    "negative threads": (["--threads", "-5"], "--threads is -5: it must be a whole number from 0 to 1,024"),
    "a port that wraps around": (["--port", "99999"], "--port is 99999: it must be a whole number from 0 to 65,535"),
    "memory that is no number": (["--kv-memory-gib", "nan"], "--kv-memory-gib is nan: it must be more than 0"),
    "a negative time": (["--drain-seconds-max", "-5"], "--drain-seconds-max is -5.0: it must be from 0"),
    "no pool": (["--kv-blocks", "0"], "--kv-blocks is 0"),
    "a template that is not there": (["--chat-template", NO_TEMPLATE], f"--chat-template {NO_TEMPLATE}: cannot be read"),
    "a host that nobody knows": (["--host", "no.such.host.invalid"], "--host no.such.host.invalid is not known here"),
    "an address of another machine": (["--host", "192.0.2.1"], "--host must be an address of this machine"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_serve_says_it_in_one_line_and_starts_nothing(case):
    """The model does not exist: had it been looked for, that would be the complaint."""
    arguments, words = REFUSED[case]
    ran = baton_here("serve", "no-such-model", *([] if "--port" in arguments else ["--port", "0"]), *arguments)
    assert ran.returncode == 1
    assert words in said(ran)
    assert ran.stderr.count("\n") == 1, ran.stderr


def test_a_template_that_is_not_text(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_bytes(b"\xff\xfe\x00")
    ran = baton_here("serve", "no-such-model", "--port", "0", "--chat-template", file)
    assert "it is not UTF-8 text" in said(ran)
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://", "ftp://127.0.0.1", "127.0.0.1:8000"]
)
def test_addresses_that_are_none(url):
    ran = baton_here("chat", "--url", url)
    assert ran.returncode == 1
    assert "write http://HOST:PORT" in said(ran)
    assert ran.stderr.count("\n") == 1, ran.stderr


def test_every_setting_that_is_secret_is_kept_out_of_messages(tmp_path):
    assert "api_key" in {setting.name for setting in all_settings()}
    file = tmp_path / "serve.yaml"
    file.write_text('api_key: {"secret": "hunter2"}\n')
    with pytest.raises(Failed) as wrong:
        read_config({"config": file})
    assert "hunter2" not in str(wrong.value)


# An instance of a cluster


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"role": "prefill"}, "--role is prefill: such an instance gets its requests from a router"),
        ({"role": "decode", "cluster_secret": "x"}, "--role is decode"),
        ({"router": ["tcp://a:1"]}, "--router needs a cluster_secret"),
        ({"cluster_secret": "x"}, "--cluster-secret is for an instance that has a --router"),
        (
            {"router": ["http://a:8000"], "cluster_secret": "x"},
            "--router 'http://a:8000' is no address of a router's cluster port",
        ),
        ({"router": ["tcp://a:1,tcp://b"], "cluster_secret": "x"}, "--router 'tcp://b' is no address"),
        ({"router": [","], "cluster_secret": "x"}, "--router is empty"),
        ({"name": "two words"}, "--name must be up to 64"),
        ({"name": "x" * 65}, "--name must be up to 64"),
    ],
)
def test_settings_of_an_instance_fit_together(given, words):
    with pytest.raises(Failed) as wrong:
        read_config(given)
    assert words in str(wrong.value)


def test_routers_may_be_given_with_commas():
    config = read_config({"router": ["tcp://a:1,b:2", "unix:/c"], "cluster_secret": "x", "role": "decode", "name": "d0"})
    assert config.routers == ("tcp://a:1", "b:2", "unix:/c")
    engine = config.engine()
    assert (engine.routers, engine.role, engine.name, engine.cluster_secret) == (config.routers, "decode", "d0", "x")
    assert engine.health_url == "http://127.0.0.1:8000"


def test_a_secret_that_others_can_read_is_refused_before_anything_starts(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    secret.chmod(0o644)
    ran = baton_here("serve", "--router", "127.0.0.1:1", "--cluster-secret", str(secret), "--port", "0")
    assert ran.returncode == 1
    assert f"chmod 600 {secret}" in said(ran)
    assert "sss" not in said(ran)
