"""What README and docs/ name exists: links, files, commands, options, keys, metrics, routes, models. They are for readers."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from exported import cluster_page, instance_page
from pages import ALL, READERS, ROOT, anchors, command_lines, fences, links, name_of, prose, spans, text_of

from baton.api.app import PAGE, ROUTES
from baton.api.routes.cluster import cluster_route
from baton.cli.main import app
from baton.config import ServeConfig
from baton.familiar import ALIASES, FOREIGN, SHORT
from baton.models.encoders.families import FAMILIES
from baton.models.registry import ARCHITECTURES
from baton.models.text_part import WRAPPERS

each_page = pytest.mark.parametrize("page", READERS, ids=name_of)
every_page = pytest.mark.parametrize("page", ALL, ids=name_of)
CURRENT = [page for page in ALL if page.parent.name != "notes" and page.name not in ("CHANGELOG.md", "renames.md")]
"""Pages about the tree as it is; the others are history."""
current_page = pytest.mark.parametrize("page", CURRENT, ids=name_of)


# Links and files


@every_page
def test_links_lead_somewhere(page: Path):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{link} of {name_of(page)}"
        assert not anchor or anchor in anchors(target), f"{link} of {name_of(page)}: no such heading"


@every_page
def test_files_that_are_named_exist(page: Path):
    named = {
        name for span in spans(page) for name in re.findall(r"(?<![\w/])(?:docs|bench|src|tests|examples)/[\w./-]+\.\w+", span)
    }
    assert not [name for name in named if "NAME" not in name and not (ROOT / name).exists()]


BASES = [ROOT, *(ROOT / "src" / "baton" / name for name in (".", "core", "native", "worker", "runtime"))]
"""Pages shorten paths of the source as the code's own comments do."""
ELSEWHERE_FILES = {"1_Pooling/config.json", "tests/seeds/NAME.json"}
"""Files of a model's folder, and of the reader."""


@current_page
def test_paths_of_the_source_exist(page: Path):
    named = {
        name
        for span in spans(page)
        for name in re.findall(r"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:py|c|h|md|json|txt))\b(?!\.)", span)
    }
    assert not [name for name in named - ELSEWHERE_FILES if not any((base / name).exists() for base in BASES)]


def test_no_text_names_a_document_that_is_gone():
    """The design was a blueprint with sections before it was pages."""
    texts = [path for folder in ("src", "tests", "bench", "tools", "docs") for path in (ROOT / folder).rglob("*")]
    texts = [path for path in texts if path.suffix in (".py", ".h", ".c", ".toml", ".md") and path != Path(__file__)]
    assert not [str(path.relative_to(ROOT)) for path in texts if "blueprint" in path.read_text("utf-8").lower()]


def test_pages_that_the_source_names_exist():
    """Error texts, too, send users to pages."""
    named = {
        (name, str(path.relative_to(ROOT)))
        for folder in ("src", "tests", "bench")
        for path in (ROOT / folder).rglob("*.[pch]*")
        if path.suffix in (".py", ".h", ".c")
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text("utf-8"))
    }
    assert not [(name, path) for name, path in named if not (ROOT / name).exists()]


@current_page
def test_targets_of_make_exist(page: Path):
    known = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    used = {name for line in command_lines(page) for name in re.findall(r"^make ([a-z][\w-]*)", line)}
    assert used <= known


# Commands and options

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def options_of(command: object) -> set[str]:
    own = {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name[0] == "-"}  # type: ignore[attr-defined]
    below = {name for each in getattr(command, "commands", {}).values() for name in options_of(each)}
    return own | below | {"--help", "--help-all", "-h"}


ELSEWHERE = {f"--{name.replace('_', '-')}" for name in FOREIGN} | {letters for them in SHORT.values() for letters in them}
OPTIONS = {name: options_of(command) for name, command in COMMANDS.items()}
KNOWN = set().union(*OPTIONS.values(), ELSEWHERE, options_of(typer.main.get_command(app)))
OTHERS = re.compile(
    r"(vllm|llama-|ollama|docker|kubectl|pip|git|curl|guidellm|lm_eval|redis-cli|[A-Z]+_\w+=|pytest|make|claude|codex|npm|npx"
    r"|python -m (?!baton))|--(?:profile|constraint) kind="
)
"""Programs of others: their options are their own."""


def words_after_baton(line: str) -> list[list[str]]:
    """`baton serve X; baton run Y` -> [[serve, X], [run, Y]]."""
    found = re.findall(r"(?:^|[|;&(] *|docker run .* )baton ((?:[^|;&`]|'[^']*')+)", line)
    return [words.split() for words in found]


def shell_options(line: str) -> list[str]:
    return [name.rstrip("=") for name in re.findall(r"(?<![\w-])(--[a-z][\w-]*=?)", line)]


@current_page
def test_commands_exist_and_have_the_options_that_they_are_shown_with(page: Path):
    for line in command_lines(page):
        for words in words_after_baton(line):
            first = words[0].strip(",.")
            if not re.fullmatch(r"[a-z][a-z-]+", first):
                continue
            assert first in COMMANDS, f"baton {first}: {line}"
            allowed = OPTIONS[first] | (ELSEWHERE if first in ("serve", "up") else set())
            assert not set(shell_options(" ".join(words))) - allowed, line


def options_of_programs() -> set[str]:
    """Options of bench/ and tests/: pages for readers of the code name them, too."""
    programs = [path for folder in ("bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    return {name for path in programs for name in re.findall(r"\"(--[a-z][\w-]*)\"", path.read_text("utf-8"))}


@current_page
def test_options_exist(page: Path):
    known = KNOWN if page in READERS else KNOWN | options_of_programs()
    for line in command_lines(page):
        script = re.search(r"bench/\w+\.py", line)
        if script or OTHERS.match(line):
            continue
        assert not set(shell_options(line)) - known, line


@every_page
def test_options_of_bench_programs_exist(page: Path):
    for line in command_lines(page):
        script = re.match(r"(?:python )?(bench/\w+\.py)(.*)", line)
        if script and (ROOT / script[1]).exists():
            source = (ROOT / script[1]).read_text()
            assert not [name for name in shell_options(script[2]) if name != "--help" and f'"{name}"' not in source], line


@current_page
def test_keys_of_yaml_files_are_settings(page: Path):
    known = {field.name for field in fields(ServeConfig)} | {name for names in ALIASES.values() for name in names}
    for language, text in fences(page):
        if language == "yaml" and "baton serve --config" in text:
            keys = {str(key).replace("-", "_") for key in yaml.safe_load(text)}
            assert not keys - known


def test_names_of_other_engines_are_as_the_page_for_newcomers_says():
    rows = prose(ROOT / "docs" / "migrate.md").split("\n## Options\n")[1].split("\n## ")[0].splitlines()
    letters = {short: name for name, shorts in SHORT.items() for short in shorts}
    for theirs, here in (row.strip("| ").split(" | ") for row in rows if row.startswith("| `--")):
        if here.startswith(("accepted", "refused")):
            named = set(re.findall(r"`--([\w-]+)", theirs))
            assert {name.replace("-", "_") for name in named} <= set(FOREIGN), theirs
            continue
        ours = [name.replace("-", "_") for name in re.findall(r"`--([\w-]+)", here)]
        for part, setting in zip(theirs.split(";"), ours, strict=True):
            for name in re.findall(r"`(-{1,2}[\w-]+)", part):
                long = letters.get(name, name.removeprefix("--").replace("-", "_"))
                assert long in (setting, *ALIASES.get(setting, ())), f"{name} is not {setting}"


@each_page
def test_code_can_be_read(page: Path):
    for language, text in fences(page):
        if language == "python":
            ast.parse(text)
        elif language in ("yaml", "toml"):
            yaml.safe_load(text) if language == "yaml" else tomllib.loads(text)
        for body in re.findall(r"-d '(\{.*?\})'", text):
            json.loads(body)


# Metrics and routes

EXISTING_ROUTES = {
    (method, route.path)
    for route in (*ROUTES, PAGE, cluster_route(lambda: None))  # type: ignore[arg-type]
    for method in route.methods or ()
}
SETTINGS = {field.name for field in fields(ServeConfig)}


def metric_names() -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", instance_page() + cluster_page(), re.M))


def test_metrics_exist():
    known = metric_names()
    assert "baton:request_queue_seconds" in known
    for page in (page for page in ALL if page.parent.name != "notes"):  # those are history
        named = {name for span in spans(page) for name in re.findall(r"\b(?:baton|vllm):[a-z_]+\b", span)}
        named -= {"baton:kv"}  # keys of a Redis
        assert not named - known, name_of(page)


@current_page
def test_routes_exist(page: Path):
    for span in spans(page):
        found = re.fullmatch(r"(GET|POST|DELETE) (/\S*)", span)
        if found:
            assert (found[1], found[2]) in EXISTING_ROUTES, span


def test_log_lines_of_failures_are_those_of_the_program():
    """The last column of a table in deploy.md: parts of lines, up to the first value in them."""
    section = prose(ROOT / "docs" / "deploy.md").split("### What a failure looks like")[1].split("\n## ")[0]
    rows = [line.split(" | ")[-1] for line in section.splitlines() if line.startswith("| ")][2:]
    shown = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    assert len(shown) >= len(rows) > 8
    sources = [path.read_text("utf-8") for path in (ROOT / "src" / "baton").rglob("*.py")]

    @cache
    def texts(source: str) -> list[str]:
        nodes = ast.walk(ast.parse(source))
        return [node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str]

    def is_said(span: str) -> bool:
        likely_first = sorted(sources, key=lambda source: span not in source)  # others may have it in two literals
        return any(span in text for source in likely_first for text in texts(source))

    assert not [span for span in shown if not is_said(span)]


# What does not exist

DENIED = re.compile(
    r"\b(?:there (?:is|are) no|does not have|has no|not there yet|not supported|CPUs? only|only on (?:a |the )?CPU)\b"
)
FAMILIES_ON_GPU = (ROOT / "tests" / "gpu" / "test_families_on_gpu.py").read_text()
CAN: dict[str, tuple[str, bool]] = {
    "several GPUs": (r"one model on several GPUs(?! and)|several GPUs for one model", "tensor_parallel_size" in SETTINGS),
    "fill in the middle": (r"fill[- ]in[- ]the[- ]middle", ("POST", "/infill") in EXISTING_ROUTES),
    "GGUF files on a GPU": (r"GGUF", "def test_gguf_files(" in FAMILIES_ON_GPU),
}
"""Things that pages denied after they were there: words for each, and whether the program has it."""


def denials(page: Path) -> list[str]:
    """Sentences, and cells of tables in rows that say what is missing."""
    lines = re.sub(r"\n(?![\n|#-])", " ", prose(page)).splitlines()
    return [part for line in lines for part in re.split(r"(?<=[.;:]) ", line) if DENIED.search(part)]


@each_page
def test_pages_deny_no_route_that_exists(page: Path):
    """migrate.md said for a while that there is no /infill."""
    paths = {path for _, path in EXISTING_ROUTES}
    for sentence in denials(page):
        for missing in re.findall(r"there (?:is|are) no ((?:`[^`]+`(?:,| or| and)? ?)+)", sentence):
            assert not set(re.findall(r"`([^`]+)`", missing)) & paths, sentence


@each_page
def test_pages_deny_nothing_that_the_program_can(page: Path):
    for sentence in denials(page):
        assert not [what for what, (words, able) in CAN.items() if able and re.search(words, sentence)], sentence


# Models


@each_page
def test_a_page_that_lists_architectures_lists_all(page: Path):
    """cli.md lacked qwen3_moe for a while."""
    text = text_of(page)
    names = {name for model in ARCHITECTURES.values() for name in model.hf_names}
    if "Qwen3ForCausalLM" in text:
        assert not [name for name in names if name not in text]


def test_the_page_of_models_has_every_name_of_every_architecture():
    named = set(spans(ROOT / "docs" / "models.md"))
    for model in ARCHITECTURES.values():
        assert {*model.hf_names, *model.gguf_names} <= named
    for family in FAMILIES.values():
        assert set(family.hf_names) <= named
    assert WRAPPERS.keys() <= named


# For readers


def test_the_map_fits_two_screens_and_our_own_words_are_few():
    assert len(text_of(ROOT / "docs" / "internals" / "architecture.md").splitlines()) <= 100
    words = re.findall(r"^\| (?!word|---)", text_of(ROOT / "docs" / "internals" / "glossary.md"), re.M)
    assert 0 < len(words) <= 15


def test_no_page_and_no_source_names_a_document_that_is_not_here():
    """Lists of ours that were never published."""
    private = re.compile(r"reference list|seed-system|shared/reference|\(row \d+\)")
    files = [*ALL, *(path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))]
    files = [path for path in files if path != Path(__file__) and path.parent.name != "notes"]
    assert not [name_of(path) for path in files if private.search(path.read_text("utf-8"))]


def test_the_readme_fits_two_screens():
    text = text_of(ROOT / "README.md")
    assert 55 <= len(text.splitlines()) <= 80
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures == ["docs/chat.png"]
    listed = re.findall(r"^- \[", text, re.M)
    assert len(listed) == 6


@each_page
def test_lines_fit_a_diff(page: Path):
    long = [line for line in prose(page).splitlines() if len(line) > 200 and not line.startswith("|")]
    assert not long
    broken = [line for line in prose(page).splitlines() if line.count("`") % 2]
    assert not broken, "code in a line of text stays on one line"


@each_page
def test_words_are_those_of_the_field(page: Path):
    """Private words that a review found readers to stumble over."""
    private = (
        *("makers", "gone on with", "goes on with", "whoever", "nobody", "somebody", "stands still", "stray", "rehears"),
        *("a number that is none", "is told", "are told", "was told", "over it 400", "turned away", "so many of"),
    )
    text = prose(page).lower()
    assert not [words for words in private if words in text]


@current_page
def test_sentences_have_subjects(page: Path):
    """Pages for readers of the code, too: the table of mutants and code spans are names of their own."""
    text = re.sub(r"<!-- mutants -->.*?<!-- /mutants -->", "", prose(page), flags=re.S)
    text = re.sub(r'`[^`\n]*`|"[^"\n]*"', "", text)
    found = re.findall(
        r"\b(?:whoever|nobody|somebody|stands still|rehears\w+|(?:is|are|was) told|so many|goes on)\b", text, re.I
    )
    assert not found


def test_every_page_is_in_the_index():
    index = set(links(ROOT / "docs" / "README.md"))
    assert {page.name for page in READERS if page.parent.name == "docs" and page.name != "README.md"} <= index
