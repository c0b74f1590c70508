"""The process that renders templates: killed from outside, shared by threads, gone with its parent, told no secrets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from template_rig import HI, NEVER_ENDS, cpu_ticks, gone, read, render_children, until

from baton.errors import CallerError, Unavailable
from baton.text import helper_child, template_process
from baton.text.chat_template import CHATML, ChatTemplate, TemplateFailed, TemplateLimits
from baton.text.helper_wire import frame, receive
from baton.text.template_process import TemplateProcess

# Some tenths of a second, so that it can be met while it renders.
SLOW = "{% for a in range(300) %}{% set x = range(99999) | sum %}{% endfor %}{{ messages[0].content }}"
PATIENT = TemplateLimits(render_seconds_max=60.0)


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


class Rendering(threading.Thread):
    def __init__(self, template: ChatTemplate, messages: list[dict] = HI) -> None:
        super().__init__(daemon=True)
        self._template, self._messages = template, messages
        self.prompt: str | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.prompt = self._template.render(self._messages)
        except Exception as error:
            self.error = error

    def wait(self) -> Rendering:
        self.join(60)
        assert not self.is_alive()
        return self


def own_child(process: TemplateProcess, known: list[int]) -> int:
    """Pid of the child that `process` has started since `known` were there."""
    ChatTemplate("x", process=process)
    (pid,) = set(render_children()) - set(known)
    return pid


def kill_while_busy(pid: int) -> None:
    before = cpu_ticks(pid)
    until(lambda: cpu_ticks(pid) > before + 2)
    os.kill(pid, signal.SIGKILL)


# --- Killed from outside ----------------------------------------------------------------------------------------------


def test_a_child_killed_while_it_renders_is_replaced_and_the_chat_rendered(process):
    known = render_children()
    pid = own_child(process, known)
    rendering = Rendering(ChatTemplate(SLOW, limits=PATIENT, process=process))
    kill_while_busy(pid)
    assert rendering.wait().prompt == "Hi"
    assert pid not in render_children()


def test_a_child_killed_twice_on_one_chat_is_an_error_of_that_chat(process):
    known = render_children()
    pid = own_child(process, known)
    rendering = Rendering(ChatTemplate(NEVER_ENDS, limits=PATIENT, process=process))
    kill_while_busy(pid)
    until(lambda: set(render_children()) - {pid, *known})
    (second,) = set(render_children()) - {pid, *known}
    until(lambda: cpu_ticks(second) > 100)  # past its start
    os.kill(second, signal.SIGKILL)
    error = rendering.wait().error
    assert isinstance(error, TemplateFailed)
    assert "ends the process" in str(error)
    assert ChatTemplate(CHATML, process=process).render(HI)


def test_a_child_that_stands_still_is_replaced_and_the_chat_rendered(process):
    """Found by an audit: such a chat was refused, as one that its template takes too long for."""
    pid = own_child(process, render_children())
    os.kill(pid, signal.SIGSTOP)
    limits = TemplateLimits(render_seconds_max=2.0)
    assert ChatTemplate("{{ messages[0].content }}", limits=limits, process=process).render(HI) == "Hi"
    assert gone(pid)


def test_a_child_killed_while_idle_is_replaced(process):
    pid = own_child(process, render_children())
    os.kill(pid, signal.SIGKILL)
    assert ChatTemplate("{{ messages[0].content }}", process=process).render(HI) == "Hi"
    assert gone(pid)


def test_a_child_killed_before_it_is_ready_is_replaced(process):
    known = render_children()
    process.start()
    until(lambda: set(render_children()) - set(known))
    (pid,) = set(render_children()) - set(known)
    os.kill(pid, signal.SIGKILL)
    assert ChatTemplate("{{ messages[0].content }}", process=process).render(HI) == "Hi"


def test_a_child_that_does_not_start_is_no_fault_of_the_template(process, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="does not start: it ended with status 1"):
        ChatTemplate(CHATML, process=process)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="cannot be started: No such file"):
        ChatTemplate(CHATML, process=process)
    monkeypatch.undo()
    assert ChatTemplate(CHATML, process=process).render(HI)


# --- Threads ----------------------------------------------------------------------------------------------------------


def test_threads_get_their_own_prompts(process):
    template = ChatTemplate("{{ messages[0].content }}", process=process)
    wrong: list[str] = []

    def work(word: str) -> None:
        for turn in range(50):
            content = f"{word}{turn}" * (1 + turn * 20)
            if template.render([{"role": "user", "content": content}]) != content:
                wrong.append(word)

    threads = [threading.Thread(target=work, args=(word,)) for word in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_timer_of_a_child_ends_with_the_request(monkeypatch):
    """An idle child stays: it is for a parent that is gone in the middle of one."""
    timers = []
    monkeypatch.setattr(helper_child.signal, "setitimer", lambda which, seconds: timers.append((which, seconds)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(None) + frame([5.0, "request"]))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            helper_child.serve(theirs, lambda first: str.upper, "no memory")
        assert [receive(ours), receive(ours)] == ["ready", "REQUEST"]
    assert timers == [(signal.ITIMER_REAL, 6.0), (signal.ITIMER_REAL, 0)]


def test_who_waits_too_long_for_others_is_told_to_try_again(process, monkeypatch):
    pid = own_child(process, render_children())
    template = ChatTemplate(CHATML, process=process)
    busy = Rendering(ChatTemplate(NEVER_ENDS, limits=TemplateLimits(render_seconds_max=2.0), process=process))
    until(lambda: cpu_ticks(pid) > 20)
    monkeypatch.setattr(process, "turn_seconds_max", 0.01)
    with pytest.raises(Unavailable, match="try again"):
        template.render(HI)
    assert isinstance(busy.wait().error, TemplateFailed)
    assert template.render(HI)


# --- The end of the parent --------------------------------------------------------------------------------------------


def script(lines: str, *flags: str) -> subprocess.Popen:
    code = "from baton.text.chat_template import *\nimport os, sys, time\nHI = [{'role': 'user', 'content': 'Hi'}]\n" + lines
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def test_an_idle_child_ends_with_a_parent_that_was_killed():
    with script("print(ChatTemplate(CHATML).render(HI)[:2], flush=True); sys.stdin.read()") as parent:
        assert parent.stdout.readline() == "<|\n"
        (pid,) = render_children(parent.pid)
        parent.kill()
    until(lambda: gone(pid))


def test_a_rendering_child_ends_with_a_parent_that_was_killed():
    lines = (
        f"template = ChatTemplate({NEVER_ENDS!r}, limits=TemplateLimits(render_seconds_max=3.0))\n"
        "print('ready', flush=True)\ntemplate.render(HI)"
    )
    with script(lines) as parent:
        parent.stdout.readline()
        (pid,) = render_children(parent.pid)
        until(lambda: cpu_ticks(pid) > 30)
        parent.kill()
    until(lambda: gone(pid))


def test_a_child_ends_with_a_parent_that_ends_and_nothing_is_said():
    with script("print(ChatTemplate(CHATML).render(HI)[:2]); print(os.getpid())", "-X", "dev", "-W", "error") as parent:
        out, err = parent.communicate(timeout=60)
    assert out.startswith("<|\n")
    assert err == ""


def test_after_a_fork_both_sides_get_their_own_prompts():
    lines = (
        "template = ChatTemplate('{{ messages[0].content }}')\n"
        "forked = os.fork()\n"
        "word = 'parent' if forked else 'forked'\n"
        "right = all(template.render([{'role': 'user', 'content': word * 999}]) == word * 999 for _ in range(200))\n"
        "if not forked: os._exit(0 if right else 1)\n"
        "print(right, os.waitpid(forked, 0)[1])\n"
    )
    with script(lines) as parent:
        out, err = parent.communicate(timeout=60)
    assert (out, err) == ("True 0\n", "")


# --- What the child knows, and what it says ---------------------------------------------------------------------------


def test_the_child_is_told_no_secrets_of_the_environment(process, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "top secret")
    pid = own_child(process, render_children())
    environment = read(f"/proc/{pid}/environ")
    assert b"PYTHONPATH" in environment
    assert b"secret" not in environment


def test_the_child_is_bounded_by_the_kernel(process):
    limits = read(f"/proc/{own_child(process, render_children())}/limits").decode()
    hard = {line[:26].strip(): line.split()[-2] for line in limits.splitlines()[1:]}
    assert hard["Max address space"] == str(template_process.MEMORY_BYTES_MAX)
    assert hard["Max core file size"] == "0"
    assert hard["Max file size"] == "0"


def test_jinja2_is_loaded_in_the_child_alone():
    with script("import baton.text.loading; ChatTemplate(CHATML).render(HI); print('jinja2' in sys.modules)") as parent:
        assert parent.communicate(timeout=60) == ("False\n", "")


def test_nothing_of_a_chat_is_logged(process, capfd, caplog):
    secret = [{"role": "user", "content": "top secret"}]
    pid = own_child(process, render_children())
    for source in ("{{ raise_exception(messages[0].content) }}", "{{ messages[0].content * 10 ** 10 }}", NEVER_ENDS):
        with pytest.raises(TemplateFailed):
            ChatTemplate(source, limits=TemplateLimits(render_seconds_max=0.5), process=process).render(secret)
    assert gone(pid)
    said = capfd.readouterr()
    assert "secret" not in said.out + said.err + caplog.text


# --- What JSON has and msgpack has not --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**40, -(10**40), 0, True])
def test_integers_of_any_size_reach_the_template(number):
    template = ChatTemplate("{{ n }} {{ messages[0].n + 1 }}")
    assert template.render([{"role": "user", "content": "x", "n": number}], extras={"n": number}) == f"{number} {number + 1}"


def test_lone_surrogates_of_every_field_become_replacement_characters():
    template = ChatTemplate("{{ messages[0] | tojson }}{{ '\\ud800' }}")
    assert template.render([{"role": "user", "content": "\ud800", "\udfff": [10**40]}]).count("\ufffd") == 3


def test_values_that_json_does_not_have_are_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, object()):
        with pytest.raises(CallerError, match="JSON"):
            ChatTemplate(CHATML).render([{"role": "user", "content": "x", "extra": value}])
