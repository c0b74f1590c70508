"""Writes docs/options.md from the schema of options: `python -m baton.cli.options_page > docs/options.md`.

tests/cli/test_options_page.py compares the page with it.
"""

from __future__ import annotations

from baton.cli.cluster_options import PlacementOptions, RayOptions, RouterOptions, UpOptions
from baton.config.schema import Setting, all_settings, by_group, flag_of
from baton.familiar import ENGINES, ENVIRONMENT, SHORT
from baton.familiar.rows import Row

HEAD = """# Options

<!-- Generated from the schema of options: python -m baton.cli.options_page > docs/options.md -->

Every option of `baton serve` has one name everywhere: `--max-model-len` on the command line, `max_model_len` (or
`max-model-len`) in the YAML file of `--config`, `LLM(max_model_len=...)` in Python, `serve.max_model_len` in `GET /config`.
A flag on the command line wins over the file. A flag without a value has an opposite: `--no-enable-prefix-caching`. Lists
are given by repeating the option, or as JSON. No setting is read from an environment variable. `baton serve --help` shows
the options that people use, `--help-all` all of them.

A value out of its range is refused before anything is downloaded or started. Other names for the same option are accepted
for ever.
"""

CLUSTER_HEAD = """
## Cluster: `baton up` and `baton router`

`baton up` has the options above too, for each of its instances. `baton router` has those of the model's name, the server,
the queue and the administration.
"""

ENGINES_HEAD = """
## Options of other engines

Start scripts of other engines work as far as possible: an option is honoured, or accepted with one line that says why it is
not needed, or refused with what to use. The same names work in the YAML file and as keywords of `LLM`. Underscores are
taken as dashes.
"""

VARIABLES_HEAD = """
### Environment variables

Variables of other engines are not read. Where one is set, `baton serve` says so at its start.

| variable | use |
|---|---|
"""


CLUSTER_OPTIONS = {
    UpOptions: "Of `baton up`",
    RayOptions: "Of `baton up`, on Ray",
    RouterOptions: "Of `baton router`",
    PlacementOptions: "Of both",
}


def options_page() -> str:
    parts = [HEAD]
    for group, settings in by_group(all_settings()).items():
        parts.append(f"\n## {group}\n\n{table_of(settings)}")
    parts.append(CLUSTER_HEAD)
    for owner, title in CLUSTER_OPTIONS.items():
        parts.append(f"\n### {title}\n\n")
        parts += map(table_of, by_group(all_settings(owner)).values())
    parts.append(ENGINES_HEAD)
    for engine, rows in ENGINES.items():
        parts.append(f"\n### {engine}\n\n| option | here |\n|---|---|\n")
        parts += [f"| {names_of(row)} | {treatment_of(row)} |\n" for row in rows]
    parts.append(VARIABLES_HEAD)
    parts += [f"| `{name}` | {words.removeprefix('use ')} |\n" for name, words in ENVIRONMENT.items()]
    return "".join(parts)


def table_of(settings: list[Setting]) -> str:
    lines = ["| option | values | default | meaning |", "|---|---|---|---|"]
    for setting in settings:
        also = f" Also: {', '.join(f'`{flag_of(name)}`' for name in setting.aliases)}." if setting.aliases else ""
        default = f"`{setting.default_text}`" if setting.default_text else ""
        flag = f"`{setting.flag} {setting.metavar}`" if setting.metavar else f"`{setting.flag}`"
        lines.append(f"| {flag} | {setting.type_text} | {default} | {_in_cell(setting.help)}{also} |")
    return "\n".join(lines) + "\n"


def _in_cell(text: str) -> str:
    """Escapes marks of Markdown and HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")


def names_of(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in (flag_of(row.name), *SHORT.get(row.name, ())))


def treatment_of(row: Row) -> str:
    if row.kind == "same":
        return "the same"
    if row.kind == "alias":
        return f"`{flag_of(row.setting)}`"
    if row.kind == "not needed":
        return f"accepted, not needed: {row.words}"
    if row.kind == "only":
        return f"{' or '.join(f'`{value}`' for value in row.only)} is accepted; else refused: {row.words}"
    if row.kind == "several":
        return f"taken apart: {row.words}"
    return f"refused: {row.words}"


if __name__ == "__main__":
    print(options_page(), end="")
