"""Every field of ServeConfig is a flag and a YAML key; flags win; what is unknown is refused with a suggestion."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import cache
from typing import Literal, get_args, get_origin

import pytest
import typer

from baton.api.config import api_config_of
from baton.cli.main import app
from baton.cli.say import Failed
from baton.cli.settings import read_config
from baton.config import ServeConfig
from baton.config.schema import GROUPS, all_settings
from baton.errors import InvalidConfig

SETTINGS = {setting.name: setting for setting in all_settings()}
FIELDS = [field.name for field in fields(ServeConfig)]


ROUTERS = ["tcp://a:1", "b:2"]
BESIDE = {
    "speculative_tokens": {"speculate": "ngram"},
    "router": {"cluster_secret": "file"},
    "cluster_secret": {"router": ROUTERS},
    "role": {"router": ROUTERS, "cluster_secret": "file"},
    "transfer_announce": {"router": ROUTERS, "cluster_secret": "file", "transfer_address": "0.0.0.0:8200"},
    "cluster_ssl_certfile": {"router": ROUTERS, "cluster_secret": "file", "cluster_ssl_ca_certs": "file"},
    "cluster_ssl_keyfile": {
        "router": ROUTERS,
        "cluster_secret": "file",
        "cluster_ssl_certfile": "file",
        "cluster_ssl_ca_certs": "file",
    },
    "cluster_ssl_ca_certs": {"router": ROUTERS, "cluster_secret": "file", "cluster_ssl_certfile": "file"},
    "ssl_keyfile": {"ssl_certfile": "file"},
    "ssl_ca_certs": {"ssl_certfile": "file"},
}
"""Settings that are nothing without others."""


OTHER = {
    "root_path": "/x",
    "limits": {"streams": 7},
    "wire": {"readers_max": 7},
    "transfer_address": "none",
    "transfer_announce": "nat.example:8200",
    "allowed_origins": ["https://a", "https://b"],
    "device": "cuda",
    "speculate": "draft:small",
}


def other_value(name):
    """Some value that is not the default, as YAML would give it."""
    setting = SETTINGS[name]
    kind = setting.kind
    if name == "router":
        return ROUTERS
    if name in OTHER:
        return OTHER[name]
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    return {bool: not setting.default, int: 7, float: 0.75, str: "x", list[str]: ["a", "b"]}[kind]


def as_flags(name, value):
    flag = SETTINGS[name].flag
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [part for each in (value if isinstance(value, list) else [value]) for part in (flag, str(each))]


def as_config(values):
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@cache
def serve_command():
    return typer.main.get_command(app).commands["serve"]


def given_by(arguments):
    """The config that `baton serve ARGUMENTS` would run with."""
    given = serve_command().make_context("serve", list(arguments)).params
    own = ("quiet", "until_stdin_ends")  # of the command, and no setting
    return read_config({name: value for name, value in given.items() if name not in own and value not in (None, [], ())})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag(name):
    values = {name: other_value(name), **BESIDE.get(name, {})}
    config = given_by([part for each, value in values.items() for part in as_flags(each, value)])
    assert asdict(config) == {**asdict(ServeConfig()), **as_config(values)}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("spelling", ["_", "-"])
def test_every_field_is_a_yaml_key(name, spelling, tmp_path):
    values = {name: other_value(name), **BESIDE.get(name, {})}
    file = tmp_path / "serve.yaml"
    file.write_text("".join(f"{each.replace('_', spelling)}: {json.dumps(value)}\n" for each, value in values.items()))
    assert asdict(read_config({"config": file})) == {**asdict(ServeConfig()), **as_config(values)}


OF_THE_COMMAND = {
    "revision", "served_model_name", "port", "api_key_file", "admin_api_key_file", "admin_host", "ssl_certfile", "ssl_keyfile",
    "ssl_ca_certs", "root_path", "chat_template", "shutdown_delay", "data_parallel_size",
}  # fmt: skip
"""Read where the server is started and ended: names, files and addresses."""


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in OF_THE_COMMAND])
def test_every_setting_reaches_the_front_or_the_engine(name):
    paired = name in ("role", "speculative_tokens")  # none of the others can be without its partner
    beside = BESIDE.get(name, {}) if paired else {}
    without = ServeConfig(**as_config(beside))
    given = ServeConfig(**as_config({**BESIDE.get(name, {}), name: other_value(name)}))
    assert given.engine() != without.engine() or api_config_of(given, {}) != api_config_of(without, {})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_explained(name):
    assert SETTINGS[name].help
    assert SETTINGS[name].group in GROUPS


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 8001\nmax_num_seqs: 5\nprefix_caching: false\n")
    config = read_config({"config": file, "port": 8002, "positional": "a-model"})
    assert (config.port, config.max_num_seqs, config.enable_prefix_caching, config.model) == (8002, 5, False, "a-model")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_model_length: 5", "unknown key max_model_length; did you mean max_model_len?"),
        ("kv-block: 5", "did you mean kv_blocks?"),
        ("qqqq: 5", "baton serve --help"),
        ("port: eight", "port: expected `int`, got `str`, and it is 'eight'"),
        ("eviction: fifo", "eviction is 'fifo': it must be one of lru, lfu"),
        ("prefix_caching: 3", "prefix_caching: expected `bool`"),
        ("- port", "must hold keys with values"),
        ("port: [", "is no YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(text, words, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(text + "\n")
    with pytest.raises(Failed) as wrong:
        read_config({"config": file})
    assert words in str(wrong.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(Failed, match="cannot be read"):
        read_config({"config": tmp_path / "none.yaml"})


def test_two_models():
    with pytest.raises(Failed, match="two models"):
        read_config({"positional": "a", "model": "b"})


def test_environment_is_not_read(monkeypatch):
    for name in ("PORT", "BATON_PORT", "VLLM_PORT"):
        monkeypatch.setenv(name, "1234")
    assert read_config({}) == ServeConfig()


def test_a_list_may_be_json_as_vllm_s_are():
    config = given_by(["--allowed-origins", '["https://a.example", "*"]', "--allowed-origins", "https://b.example"])
    assert config.allowed_origins == ("https://a.example", "*", "https://b.example")
    assert given_by(["--api-key", '["x"]']).api_key == ('["x"]',), "a key is what it is"
    assert given_by(["--allowed-hosts", "[x"]).allowed_hosts == ("[x",), "what is no JSON is refused elsewhere"
    with pytest.raises(Failed, match="allowed-origins"):
        read_config({"allowed_origins": ["[3]"]})


@pytest.mark.parametrize("word", ["true", "False", "on"])
def test_a_value_behind_a_flag_is_not_taken_for_a_model(word):
    with pytest.raises(Failed, match="a flag takes no value"):
        read_config({"prefix_caching": True, "positional": word})


def test_the_shutdown_delay_is_a_part_of_the_drain():
    assert ServeConfig(shutdown_delay=30.0).shutdown_delay == 30.0
    with pytest.raises(InvalidConfig, match=r"part of drain_seconds_max \(5\)"):
        ServeConfig(shutdown_delay=10.0, drain_seconds_max=5.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "give --transfer-address"),
        ({"transfer_address": "none"}, "give --transfer-address"),
        ({"transfer_address": "0.0.0.0:8200", "transfer_announce": "nat.example:0"}, "that other machines reach"),
        ({"transfer_address": "0.0.0.0:8200", "transfer_announce": "0.0.0.0:8200"}, "that other machines reach"),
        ({"transfer_address": "0.0.0.0:8200", "transfer_announce": "nat"}, "HOST:PORT"),
        (
            {"transfer_address": "0.0.0.0:8200", "transfer_announce": "nat.example:65535", "tensor_parallel_size": 2},
            "'nat.example:65535': 2 ranks need the ports 65535 to 65536, and the last port there is is 65535: give a lower one",
        ),
    ],
)
def test_an_address_to_announce_is_one_that_others_reach(settings, words):
    member = {"router": ("dns://routers:8100",), "cluster_secret": "file", "transfer_announce": "nat.example:8200"}
    with pytest.raises(InvalidConfig, match=words):
        ServeConfig(**{**member, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 8203}, "'10.0.0.1:8200': 4 ranks need the ports 8200 to 8203, and port is 8203: give one of them another"),
        ({"admin_port": 8201, "admin_host": "10.0.0.1"}, "8200 to 8203, and admin_port is 8201"),
        ({"port": 8202, "host": "::"}, "and port is 8202"),
        ({"port": 8200, "tensor_parallel_size": 1}, "transfer_address is '10.0.0.1:8200', and port is 8200"),
        ({"transfer_address": "0.0.0.0:65533"}, "'0.0.0.0:65533': 4 ranks need the ports 65533 to 65536, and the last port"),
    ],
)
def test_ports_of_ranks_that_are_not_there_or_taken_are_refused(settings, words):
    member = {"router": ("dns://routers:8100",), "cluster_secret": "file", "host": "0.0.0.0", "tensor_parallel_size": 4}
    with pytest.raises(InvalidConfig) as error:
        ServeConfig(**{**member, "transfer_address": "10.0.0.1:8200", **settings})
    assert words in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"port": 8204}, {"port": 8199}, {"port": 8201, "host": "127.0.0.1"}, {"port": 8201, "host": "::1"}, {"port": 0}],
)
def test_ports_of_ranks_beside_others_are_used(settings):
    member = {"router": ("dns://routers:8100",), "cluster_secret": "file", "host": "0.0.0.0", "tensor_parallel_size": 4}
    assert ServeConfig(**{**member, "transfer_address": "10.0.0.1:8200", **settings})
    ports = {"transfer_address": "0.0.0.0:65532", "transfer_announce": "nat.example:65532"}
    assert ServeConfig(**{**member, **ports})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster_ssl_certfile": "file"}, "cluster_ssl_certfile and cluster_ssl_ca_certs belong together"),
        ({"cluster_ssl_ca_certs": "file"}, "cluster_ssl_certfile and cluster_ssl_ca_certs belong together"),
        ({"cluster_ssl_keyfile": "file"}, "cluster_ssl_keyfile needs cluster_ssl_certfile"),
    ],
)
def test_a_certificate_of_a_cluster_needs_an_authority(settings, words):
    with pytest.raises(InvalidConfig, match=words):
        ServeConfig(router=("dns://routers:8100",), cluster_secret="file", **settings)


def test_tls_does_not_replace_the_secret():
    with pytest.raises(InvalidConfig, match="cluster_ssl_certfile needs a cluster_secret"):
        ServeConfig(cluster_ssl_certfile="file", cluster_ssl_ca_certs="file")
