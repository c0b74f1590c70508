"""Runs `baton` the way people do, in processes of its own, on a tiny random Llama that loads in no time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BATON = (sys.executable, "-m", "baton.cli.main")
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
RECOMMENDED = {"temperature": 0.4, "top_p": 0.9, "top_k": 12, "min_p": 0.0, "repetition_penalty": 1.1}
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant:"


def baton(
    *arguments: str | Path, stdin: str = "", seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [*BATON, *map(str, arguments)]
    environment = {**ENVIRONMENT, **environment}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=seconds, check=False)


def baton_here(*arguments: str | Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, without half a second of imports: for commands that start no process and end by themselves."""
    from typer.testing import CliRunner

    from baton.cli.main import app

    with same_signal_handlers():
        env = {"COLUMNS": "100", "NO_COLOR": "1", **environment}
        ran = CliRunner().invoke(app, [*map(str, arguments)], input=stdin, env=env)
    return subprocess.CompletedProcess(arguments, ran.exit_code, ran.stdout, ran.stderr)


@contextmanager
def same_signal_handlers() -> Iterator[None]:
    """Puts back those that a command sets until its process ends: `simulate --trace` lets SIGPIPE end it, and a later test that
    writes to a closed connection would end all of this process's tests."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


def said(ran: subprocess.CompletedProcess[str]) -> str:
    """All of it on one line: a narrow terminal breaks sentences."""
    return " ".join((ran.stdout + ran.stderr).split())


class Running:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[str], url: str, text: str) -> None:
        self.process = process
        self.url = url
        self.text = text

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C: exit code, and what was said on stderr."""
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@contextmanager
def serving(
    *arguments: str | Path, command: Sequence[str] = BATON, environment: Mapping[str, str] = ENVIRONMENT
) -> Iterator[Running]:
    process = subprocess.Popen(
        [*command, "serve", "--port", "0", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not any("Ctrl-C" in line for line in lines):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            lines.append(line)
        url = next(line.split()[-1] for line in lines if line.split()[:1] == ["API"]).removesuffix("/v1")
        yield Running(process, url, "".join(lines))
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def family(pid: int) -> list[int]:
    """The process and everything below it, as /proc says now."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those that are still alive after a while; none should be."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def write_tiny_model(folder: Path) -> Path:
    """A Llama of 40 thousand weights, and a tokenizer with a token a byte."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
    hidden, inner, vocab, layers = 32, 64, 258, 2
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
