"""llama.cpp, compiled for this CPU, with its server, its tools and our driver.

    python build_llamacpp.py FOLDER [--jobs N]

The source is the one inside the sdist of llama-cpp-python, which pip fetches by name. Needs cmake, a C++ compiler and, for
speed, ninja (Debian: apt install cmake g++ ninja-build). Takes 5 to 10 minutes on two cores, and no time if FOLDER is complete.

    FOLDER/bin/llama-server, llama-bench, llama-batched-bench, llama-quantize, llamacpp_driver
    FOLDER/bin/BUILT           what was built; its features are what the driver says when it starts

One line of it is changed. gcc 12 takes AMX's tile configuration for 8 bytes instead of 64 and drops the stores to the others,
so the program dies of an illegal instruction at its first product; a barrier before the instruction helps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
TARGETS = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "GGML_NATIVE": "ON",
    "GGML_CCACHE": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
DRIVER = Path(__file__).parent / "llamacpp_driver.cpp"
TILES = Path("ggml/src/ggml-cpu/amx/mmq.cpp")
LOAD = "    _tile_loadconfig(&tc);"
BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    built = folder / "bin/BUILT"
    if not built.exists():
        source = fetch(folder)
        patch(source)
        build(source, folder, options.jobs)
        built.write_text(f"{PACKAGE}, {compiler()}, {OPTIONS}\n")
    if not is_newer(folder / "bin/llamacpp_driver", DRIVER):
        build_driver(fetch(folder), folder)


def fetch(folder: Path) -> Path:
    """The source tree of llama.cpp, unpacked once."""
    found = sorted(folder.glob("source/*/vendor/llama.cpp"))
    if found:
        return found[0]
    (folder / "source").mkdir(parents=True, exist_ok=True)
    name = PACKAGE.split("==")[0]  # what pip needs to read its metadata may well be binary
    download = ["download", "--quiet", "--no-deps", "--no-binary", name, "--dest", str(folder / "source"), PACKAGE]
    run([sys.executable, "-m", "pip", *download])
    archive = next((folder / "source").glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "source", filter="data")
    archive.unlink()
    return next(folder.glob("source/*/vendor/llama.cpp"))


def patch(source: Path) -> None:
    text = (source / TILES).read_text()
    if BARRIER not in text:
        if LOAD not in text:
            raise SystemExit(f"{TILES} is not as we know it: look whether the barrier is still needed")
        (source / TILES).write_text(text.replace(LOAD, BARRIER + LOAD))


def build(source: Path, folder: Path, jobs: int) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    settings = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    run(["cmake", "-S", str(source), "-B", str(folder / "build"), *generator, *settings])
    run(["cmake", "--build", str(folder / "build"), "--parallel", str(jobs), "--target", *TARGETS])
    shutil.copytree(folder / "build/bin", folder / "bin", symlinks=True, dirs_exist_ok=True)


def build_driver(source: Path, folder: Path) -> None:
    """Next to the libraries, which it finds there."""
    headers = [f"-I{source / part}" for part in ("include", "ggml/include", "vendor")]
    libraries = [f"-L{folder / 'bin'}", "-lllama", "-lggml", "-lggml-base", "-Wl,-rpath,$ORIGIN"]
    made = str(folder / "bin/llamacpp_driver")
    run(["c++", "-O3", "-march=native", "-std=c++17", *headers, str(DRIVER), *libraries, "-o", made])


def is_newer(made: Path, source: Path) -> bool:
    return made.exists() and made.stat().st_mtime >= source.stat().st_mtime


def compiler() -> str:
    return subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command[:6])} ...")


if __name__ == "__main__":
    main()
