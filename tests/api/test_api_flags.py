"""Nothing in the front that no flag reaches, and limits that an operator chose are in force."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import get_args

import httpx
import pytest
from api_fakes import serving

from baton.api.config import ApiConfig, ServedModel, api_config_of, limits_of
from baton.api.limits import Limits
from baton.config import ServeConfig
from baton.config.values import ReasoningParser, ToolCallParser
from baton.errors import InvalidConfig
from baton.text.parsers.styles import CALL_ALIASES, REASONING_PARSERS, THINK_ALIASES, TOOL_CALL_PARSERS, answer_style

OTHERS = {
    "api_key": ("a",), "admin_api_key": ("b",), "admin_port": 9, "host": "::1", "allowed_hosts": ("x",), "chat_page": False,
    "allowed_origins": ("*",), "client_priority_min": -1, "unknown_fields": "refuse", "streams_per_key_max": 3,
    "keep_alive_seconds": 5.0, "retry_after_seconds": 2, "text_threads": 1, "limits": {"streams": 9},
    "router": ("tcp://h:1",), "cluster_secret": "file", "tool_call_parser": "none", "reasoning_parser": "none",
    "stop_on_repetition": True,
}  # fmt: skip


def test_every_setting_of_the_front_can_be_chosen():
    made = api_config_of(ServeConfig(**OTHERS), {"something": 1})
    for field in fields(ApiConfig):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        assert getattr(made, field.name) != default, f"no flag reaches {field.name}"


def test_what_a_served_model_is_called_can_be_chosen():
    assert {field.name for field in fields(ServedModel)} >= {"name", "aliases"}
    assert ServeConfig(served_model_name=("a", "b")).served_model_name == ("a", "b")


def test_limits_that_are_chosen_are_in_force(text):
    limits = limits_of(ServeConfig(limits={"body_bytes": 1000, "header_seconds": 3}))
    assert (limits.body_bytes, limits.header_seconds, limits.streams) == (1000, 3, Limits().streams)
    with serving(text, ApiConfig(limits=limits)) as server:
        body = {"messages": [{"role": "user", "content": "x" * 1000}]}
        assert httpx.post(server.url + "/v1/chat/completions", json=body, timeout=20).status_code == 413


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"stream": 5}, r"limits has no stream; did you mean streams\?"),
        ({"qqq": 5}, "see docs/limits.md"),
        ({"streams": 2.5}, "streams is 2.5: give a whole number"),
        ({"streams": 0}, "more than 0"),
        ({"stop_strings": 17}, "at most 16 stop strings"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float], why: str):
    with pytest.raises(InvalidConfig, match=why):
        limits_of(ServeConfig(limits=limits))


def test_the_flags_of_parsers_take_every_parser():
    calls, thoughts = get_args(ToolCallParser), get_args(ReasoningParser)
    assert set(calls) == {*TOOL_CALL_PARSERS, *CALL_ALIASES}
    assert set(thoughts) == {*REASONING_PARSERS, *THINK_ALIASES}
    for name in calls:
        assert answer_style(("",), tool_calls=name).has_calls is (name != "none")
    for name in thoughts:
        assert answer_style(("<think>",), reasoning=name).has_thoughts is (name != "none")
