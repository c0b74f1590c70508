"""Packs what the GPU tests need into .gpu/, for a machine with a GPU, torch and Triton but no way to any package index.

python tools/gpu_wheels.py               downloads wheels into .gpu/ (here, with an index)
python tools/gpu_wheels.py --install     unpacks them into .gpu/site (there)
PYTHONPATH=$PWD/src:$PWD/.gpu/site pytest tests/gpu
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".gpu"
BESIDES = (
    *("click", "shellingham", "annotated-doc", "anyio", "h11", "markdown-it-py", "mdurl", "pygments"),  # what those need
    *("pytest", "pytest-timeout", "pytest-xdist", "pytest-rerunfailures", "execnet", "iniconfig", "pluggy", "hypothesis"),
    *("sortedcontainers", "gguf", "httpx", "httpcore", "openai", "pydantic", "pydantic-core", "annotated-types", "jiter"),
    *("typing-inspection", "distro", "sniffio", "tqdm", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
    *("attrs", "idna", "certifi", "typing-extensions"),
)
THERE = ("numpy", "tokenizers", "pyyaml", "jinja2")
"Packages that every machine with torch and transformers has."
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64")


def download(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [name for name in project["dependencies"] if not name.startswith(THERE)]
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms, "--dest", str(FOLDER)]
    for name in [*wanted, *BESIDES]:  # one by one: a package without such a wheel is named and left out
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options, name]
        if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
            print(f"no wheel of {name} for Python {python}", file=sys.stderr)


def install() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(FOLDER / "site")]
    subprocess.run([*pip, *map(str, sorted(FOLDER.glob("*.whl")))], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="on the machine with the GPU")
    parser.add_argument("--python", default="312", help="that machine's Python")
    settings = parser.parse_args()
    install() if settings.install else download(settings.python)
