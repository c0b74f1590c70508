"""Makes docs/chat.png: the chat page in Chromium, with real answers of the default model and the shipped settings.

    make picture

The first question is the README's. Nothing is scripted: the answers and their rate are what this machine gives.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from chromium import Browser, chromium_path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cli"))

from command_rig import serving  # noqa: E402

WIDTH, HEIGHT = 960, 600
BYTES_MAX = 200_000
MORE = ("What is photosynthesis?",)


def readme_question() -> str:
    [question] = re.findall(r'"role": "user", "content": "([^"]+)"', (ROOT / "README.md").read_text())
    return str(question)


def ask(browser: Browser, question: str) -> None:
    before = browser.evaluate("document.querySelectorAll('.assistant .numbers').length")
    browser.evaluate("document.getElementById('input').focus()")
    browser.type(question)
    browser.press_enter()
    answered = f"document.querySelectorAll('.assistant .numbers').length > {before}"
    browser.until(answered + " && document.getElementById('go').textContent === 'Send'")


def take(path: Path) -> list[str]:
    """Returns the text of the answers, with their rates."""
    executable = chromium_path()
    if executable is None:
        raise SystemExit("no chromium here")
    with serving() as server:
        browser = Browser(executable)
        try:
            browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1.5, mobile=False)
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
            browser.open(server.url + "/")
            browser.until("/context/.test(document.getElementById('model').textContent)")
            for question in (readme_question(), *MORE):
                ask(browser, question)
            browser.evaluate("document.activeElement.blur()")
            browser.screenshot(str(path))
            return list(browser.evaluate("[...document.querySelectorAll('.assistant')].map((box) => box.innerText)"))
        finally:
            browser.close()


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "chat.png"
    for answer in take(path):
        print(answer, end="\n\n")
    if path.stat().st_size > BYTES_MAX:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes: more than {BYTES_MAX}")


if __name__ == "__main__":
    main()
