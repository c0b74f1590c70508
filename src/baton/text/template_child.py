"""The process that renders chat templates (helper_child.py). Its only state is compiled templates."""

from __future__ import annotations

from typing import Any

from baton.text.helper_child import Answer, run
from baton.text.template_sandbox import TemplateSandbox


def begin(_: Any) -> Answer:
    return TemplateSandbox().answer


if __name__ == "__main__":
    run(begin, out_of_memory=("memory", ""))
