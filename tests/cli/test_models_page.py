"""docs/models.md: commands that the command line takes, a row for each family, and the memory that the shapes give."""

from __future__ import annotations

import re
from functools import cache

import pytest
import typer
from pages import ROOT

from baton.cli.main import app
from baton.kvpool.layout import INT8_FOURS, KVKind, KVLayout
from baton.models.hub import hub_name
from baton.models.registry import ARCHITECTURES

PAGE = (ROOT / "docs" / "models.md").read_text("utf-8")
TOKENS = 1_000_000
SHAPES: dict[str, tuple[int, int, int]] = {
    "Llama": (32, 8, 128),
    "Mistral": (32, 8, 128),
    "Mistral Small 3.1, text": (40, 8, 128),
    "Qwen2": (28, 4, 128),
    "Qwen2.5-VL, text": (36, 2, 128),
    "Qwen3": (36, 8, 128),
    "ERNIE 4.5": (18, 2, 128),
    "Phi": (32, 8, 128),
    "Granite": (40, 8, 128),
    "Granite 4, dense": (40, 8, 64),
    "SmolLM3": (36, 4, 128),
    "OLMo": (32, 32, 128),
    "GLM": (40, 2, 128),
    "Cohere": (32, 8, 128),
    "StableLM": (24, 32, 64),
    "EXAONE": (30, 8, 64),
    "Seed-OSS": (64, 8, 128),
    "Gemma": (28, 16, 256),
    "Gemma 3": (26, 1, 256),
    "Gemma 3, with images: text": (34, 4, 256),
    "Mixtral": (32, 8, 128),
    "Qwen2-MoE": (24, 16, 128),
    "Qwen3-MoE": (48, 4, 128),
    "OLMoE": (16, 16, 128),
    "ERNIE 4.5 MoE": (28, 4, 128),
    "GLM-4.5": (46, 8, 128),
    "gpt-oss": (24, 8, 64),
}
"""Layers, key/value heads and their width of the model in each command, as its config.json has them."""
OTHERS: dict[str, tuple[int, int, int]] = {
    "SmolLM2-135M": (30, 3, 64),
    "Qwen2.5-0.5B": (24, 2, 64),
    "Llama-3.2-1B": (16, 8, 64),
    "Qwen2.5-7B": (28, 4, 128),
    "Llama-3.2-3B, Qwen3-0.6B": (28, 8, 128),
    "Llama-3.1-8B, Mistral 7B": (32, 8, 128),
    "Qwen3-4B, Qwen3-8B": (36, 8, 128),
    "Qwen3-30B-A3B": (48, 4, 128),
}
"""The same of the second table, under Memory."""
OF_PART = {"Mistral Small 3.1, text", "Qwen2.5-VL, text", "Granite 4, dense", "Gemma 3, with images: text"}
"""Rows of the table of commands for which the table of families has another name."""


@cache
def table(heading: str) -> dict[str, list[str]]:
    """The first table below a heading: cells by the first one of each row."""
    lines = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = next(n for n, cells in enumerate(rows) if not set("".join(cells)) - {"-"})
    end = next((n for n, cells in enumerate(rows[head + 1 :], head + 1) if not set("".join(cells)) - {"-"}), len(rows) + 1)
    return {cells[0]: cells[1:] for cells in rows[head + 1 : end - 1]}


COMMANDS = table("A command for each family")


@pytest.mark.parametrize("family", COMMANDS)
def test_the_command_line_takes_the_command(family):
    words = COMMANDS[family][0].strip("`").split()
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    with serve.make_context("serve", words) as context:
        assert words[0] in context.params.values()
    assert hub_name(words[0]) is not None


def test_each_family_has_a_row_and_a_command():
    families = table("What runs where")
    assert families.keys() == COMMANDS.keys() - OF_PART
    for model in ARCHITECTURES.values():
        assert any(f"`{model.hf_names[0]}`" in cells[1] for cells in families.values()), model.name


def gib(shape: tuple[int, int, int], kind: KVKind) -> str:
    layers, kv_heads, head_dim = shape
    layout = KVLayout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=kind.dtype, format=kind.format)
    return f"{layout.block_bytes / 16 * TOKENS / 2**30:.1f}"


@pytest.mark.parametrize("family", COMMANDS)
def test_the_memory_of_a_family(family):
    shape = SHAPES[family]
    assert COMMANDS[family][1:3] == [gib(shape, INT8_FOURS), gib(shape, KVKind("bfloat16", "token-major"))]


def test_the_table_of_memory():
    kinds = (INT8_FOURS, KVKind("bfloat16", "token-major"))
    rows = table("Memory")
    assert rows.keys() == OTHERS.keys()
    for model, cells in rows.items():
        half = float(gib(OTHERS[model], kinds[1])) / 2
        assert cells[:2] == [gib(OTHERS[model], kind) for kind in kinds], model
        assert abs(float(cells[2]) - half) <= 0.06, model


def test_what_does_not_fit_one_gpu_says_so():
    """GLM-4.5-Air: 106 billion weights of two bytes were shown with `--device cuda` alone."""
    assert re.search(r"--tensor-parallel-size 2\b", COMMANDS["GLM-4.5"][0])
