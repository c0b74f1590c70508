"""docs/options.md is what the schema of options says."""

from __future__ import annotations

from pathlib import Path

from baton.cli.options_page import options_page
from baton.config import ServeConfig, shown
from baton.config.schema import GROUPS, all_settings, by_group
from baton.llm.keywords import serve_settings

PAGE = Path(__file__).parent.parent.parent / "docs" / "options.md"


def test_the_page_is_as_generated():
    assert PAGE.read_text("utf-8") == options_page(), "run: python -m baton.cli.options_page > docs/options.md"


def test_flags_keys_keywords_and_config_have_the_same_names():
    """Of the YAML file and the flags: test_settings.py."""
    names = [setting.name for setting in all_settings()]
    assert [*shown(ServeConfig())][: len(names)] == names
    for setting in all_settings():
        if setting.name != "model":
            assert serve_settings({setting.name: setting.default}) == {setting.name: setting.default}


def test_every_setting_is_in_one_group():
    settings = all_settings()
    assert sorted(one.name for them in by_group(settings).values() for one in them) == sorted(one.name for one in settings)
    assert all(setting.group in GROUPS for setting in settings), "add it to GROUPS of config/schema.py"
    places = [name for names in GROUPS.values() for name in names]
    assert len(places) == len(set(places))
