"""`baton chat` and `baton run` as conversations: reasoning is seen, speeds are right, streams are streams."""

from __future__ import annotations

import json
import shutil
from threading import Event

import pytest
from command_rig import baton
from fake_openai import fake_openai
from terminal import on_terminal

from baton.cli.conversation import Timing

DIM = b"\x1b[2m"
THOUGHT, ANSWER = "Let me think.", "Paris."
USAGE = {"completion_tokens": 30, "completion_tokens_details": {"reasoning_tokens": 20}}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_dimmed_while_it_comes(name):
    hold = Event()
    with (
        fake_openai([{name: THOUGHT}, {"content": ANSWER}], USAGE, hold=hold) as url,
        on_terminal("chat", "--url", url) as terminal,
    ):
        prompt = terminal.until("> ")
        terminal.write("Capital of France?\r")
        thought = terminal.until(THOUGHT, prompt)  # the answer waits until this was seen
        assert DIM in terminal.seen[prompt:thought]
        hold.set()
        answer = terminal.until(ANSWER, thought)
        assert b"\x1b[0m" in terminal.seen[thought:answer]
        terminal.until("20 tokens", answer)
        terminal.until("of answer", answer)


def test_stdout_is_the_answer_alone():
    with fake_openai([{"reasoning_content": THOUGHT}, {"content": ANSWER}], USAGE) as url:
        ran = baton("chat", "--url", url, stdin="Capital of France?\n")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{ANSWER}\n"
    assert THOUGHT in ran.stderr


@pytest.mark.parametrize(
    ("timing", "words"),
    [
        (Timing(0.0, [], [1.0, 2.0, 3.0], 21), "21 tokens at 10.0 tok/s, first after 1.00 s"),
        # One piece of answer right behind 4 s of reasoning: its rate is of its own time, and not of no time at all.
        (
            Timing(0.0, [1.0, 3.0, 5.0], [5.5], 121, 100),
            "100 tokens at 24.8 tok/s of reasoning; 21 tokens at 42.0 tok/s of answer, first after 1.00 s",
        ),
        (
            Timing(0.0, [1.0, 2.0], [3.0, 4.0], 40),
            "20 tokens at 19.0 tok/s of reasoning; 20 tokens at 10.0 tok/s of answer, first",
        ),
        (
            Timing(0.0, [1.0, 2.0], [], 11, 11),
            "11 tokens at 10.0 tok/s of reasoning, first after 1.00 s, and no answer: --max-",
        ),
        (Timing(0.0, [], [2.0], 1), "1 tokens, first after 2.00 s"),
        (Timing(0.0), "no text"),
    ],
)
def test_rates(timing, words):
    assert timing.text().startswith(words)


def test_a_server_that_has_another_model_says_which():
    with fake_openai([], {}) as url:
        ran = baton("chat", "other", "--url", url)
    assert (ran.returncode, ran.stderr) == (
        1,
        f"baton chat: {url} serves thinker, not other: name one of these, or leave out --url\n",
    )


def test_a_server_that_accepts_every_name_answers_to_any():
    """--served-model-name '*': /v1/models lists the model's own name, and /v1/models/NAME knows every one."""
    with fake_openai([{"content": "Hello."}], {"completion_tokens": 1}, any_name=True) as url:
        ran = baton("chat", "org/other", "--url", url, stdin="Hi\n")
    assert (ran.returncode, ran.stdout) == (0, "Hello.\n"), ran.stderr
    assert f"org/other at {url} (it serves thinker under every name)" in ran.stderr


def test_run_without_a_prompt_is_a_conversation_in_a_terminal(tiny_model):
    with on_terminal("run", tiny_model, "--max-tokens", "5", "--threads", "1") as terminal:
        prompt = terminal.until("> ")
        terminal.write("Hello\r")
        terminal.until("5 tokens", prompt)
        terminal.write("/exit\r")
        assert terminal.process.wait(60) == 0


def test_run_streams_to_a_terminal(tiny_model):
    """Piece by piece: with 300 tokens something is written before the last of them."""
    with on_terminal("run", tiny_model, "Hello", "--max-tokens", "300", "--temperature", "1", "--threads", "1") as terminal:
        pieces = 0
        while b"tok/s" not in terminal.seen:
            pieces += bool(terminal.read(60.0))
        assert terminal.process.wait(60) == 0
    assert pieces > 10


def test_run_shows_reasoning_dimmed(tiny_model, tmp_path):
    """The template begins a thought, so everything up to `</think>` is reasoning, and the tag itself is not shown."""
    folder = shutil.copytree(tiny_model, tmp_path / "thinker")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0]['content'] }}{% if enable_thinking %}{% endif %}<think>\n"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with on_terminal("run", str(folder), "Hello", "--max-tokens", "20", "--threads", "1") as terminal:
        terminal.until("of reasoning")
        assert terminal.process.wait(60) == 0
    assert DIM in terminal.seen
    assert b"<think>" not in terminal.seen


def test_run_takes_a_prompt_from_a_pipe(tiny_model):
    ran = baton("run", tiny_model, "--max-tokens", "3", "--threads", "1", stdin="Hello\n")
    assert ran.returncode == 0, ran.stderr
    assert "3 tokens" in ran.stderr


def test_run_ends_at_a_stop_text(tiny_model):
    """The likeliest text once more, with a stop text out of its middle."""
    greedy = ("run", tiny_model, "Hello", "--max-tokens", "40", "--temperature", "0", "--threads", "1")
    whole = baton(*greedy, "--min-p", "0.1").stdout
    stop = whole[10:12]
    assert baton(*greedy, "--stop", "never there", "--stop", stop).stdout == whole[: whole.index(stop)] + "\n"
