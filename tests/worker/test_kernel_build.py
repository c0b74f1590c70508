"""Compiling at first use: together, again, and where it cannot be done."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rig import TINY, generate, tiny_model

from baton.models.load import LoadedModel, dummy_model
from baton.models.tokenizer_source import TokenizerSource
from baton.worker.attention import native
from baton.worker.attention.build import NoCompiler, find_compiler, load_library
from baton.worker.attention.choose import attention_for
from baton.worker.kv_pool import KVLayout, KVPool

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler: neither cc, gcc nor clang is there"
)


@needs_compiler
def test_processes_that_start_together_all_get_a_whole_library(tmp_path):
    code = (
        "import sys; from pathlib import Path; from baton.worker.attention.build import load_library;"
        f"library = load_library(Path({str(native.SOURCE)!r}), Path({str(tmp_path)!r}));"
        "print(library.baton_rows_per_item())"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {child.communicate()[0].strip() for child in children} == {"48"}
    (made,) = tmp_path.iterdir()  # one library, no scratch folder left
    assert made.suffix == ".so"
    before = made.stat().st_mtime_ns
    load_library(native.SOURCE, tmp_path)
    assert made.stat().st_mtime_ns == before


@needs_compiler
def test_other_source_or_processor_is_another_library(tmp_path, monkeypatch):
    source = tmp_path / "paged_attention.c"
    source.write_text(native.SOURCE.read_text() + "\n/* changed */\n")
    for path in (native.SOURCE, source):
        load_library(path, tmp_path / "cache")
    monkeypatch.setattr("baton.worker.attention.build.processor", lambda: "another")
    load_library(source, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 3


@needs_compiler
def test_source_that_does_not_compile_says_why(tmp_path):
    source = tmp_path / "broken.c"
    source.write_text("int f(void) { return nonsense; }")
    with pytest.raises(NoCompiler, match="nonsense"):
        load_library(source, tmp_path / "cache")


@needs_compiler
def test_only_one_openmp_runtime_is_loaded():
    native._library()
    names = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/lib" in line}
    runtimes = {path.resolve() for path in names if path.name.startswith(("libgomp", "libomp", "libiomp"))}
    torch_only = {path for path in runtimes if "torch" in path.parts or "torch.libs" in path.parts}
    assert runtimes == torch_only or len(runtimes) == 1


def test_without_a_compiler_torch_does_it(monkeypatch, caplog):
    def none() -> None:
        raise NoCompiler("no C compiler")

    monkeypatch.setattr(native, "_library", none)
    pool = KVPool.create(KVLayout.of(TINY, 4, "float32"), 2)
    with caplog.at_level(logging.WARNING):
        assert attention_for(TINY, pool).name == "gathered"
    assert "plain torch" in caplog.text


def test_no_compiler_is_found_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NoCompiler, match="no C compiler"):
        find_compiler()
    assert os.environ["PATH"] == str(tmp_path)


def test_half_precision_models_run_in_plain_torch():
    model = LoadedModel(Path(), TINY, dummy_model(TINY, seed=3, dtype=torch.bfloat16), TokenizerSource(None, None))
    prompts = {"a": [1, 2, 3, 4, 5], "b": [9, 8]}
    half = generate(model, prompts, max_tokens=4)
    assert {key: len(tokens) for key, tokens in half.items()} == {("a", 0): 4, ("b", 0): 4}
    assert half["b", 0][0] == generate(tiny_model(), prompts, max_tokens=4)["b", 0][0]
