"""Asks llama.cpp for the ids of texts under these ways of cutting words, and adds them to data/llama_cpp_ids.json.

    python tests/text/llama_cpp_ids.py SmolLM2.gguf gpt-4o tekken

Runs in a Python that has xllamacpp, gguf and numpy; the tests need only the file that it writes. The model has SmolLM2's
vocabulary and one layer of zeros.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

FILE = Path(__file__).parent / "data" / "llama_cpp_ids.json"
MORE_TEXTS = (
    "HelloWorld camelCase DON'T don't We'LL iPhone15Pro",
    "1234567 12,345.678 ٣٤٥٦ ½",
    "a//b /usr/bin\n\n/x ++i;\r\n\tif (x) {}  \r\n",
    "Ελληνικά ΚΕΦΑΛΑΙΑ Привет МИР ǅungla ﬁn",
    "हिन्दी ภาษาไทย e\u0301a\u0301  नमस्ते",
    "  leading and trailing   ",
)


def write_vocabulary(path: Path, source: Path, pre: str) -> None:
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 32}
    for key, value in {**sizes, "attention.head_count": 1, "rope.dimension_count": 32}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for field in reader.fields.values():
        if field.name.startswith("tokenizer.ggml."):
            value = pre if field.name == "tokenizer.ggml.pre" else field.contents()
            kind, inner = field.types[0], field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, value, kind, inner)
    tokens = len(reader.get_field("tokenizer.ggml.tokens").data)
    shapes = {"token_embd": (tokens, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name, shape in {**shapes, **{f"blk.0.{part}": (32, 32) for part in parts}}.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_of(path: Path, texts: list[str]) -> list[list[list[int]]]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.verbosity, params.warmup = 64, -1, False
    server = xllamacpp.Server(params)

    def asked(text: str, special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]

    return [[asked(text, False), asked(text, True)] for text in texts]


def main() -> None:
    before = json.loads(FILE.read_text("utf-8"))
    texts, found = list(dict.fromkeys([*before["texts"], *MORE_TEXTS])), before["ids"]
    first = found["smollm"]
    for name in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.gguf"
            write_vocabulary(path, Path(sys.argv[1]), name)
            pairs = [[plain] if plain == special else [plain, special] for plain, special in ids_of(path, texts)]
        found[name] = [None if n < len(first) and first[n] == pair else pair for n, pair in enumerate(pairs)]
        print(name, sum(pair is not None for pair in found[name]), flush=True)
        write(texts, found)


def write(texts: list[str], found: dict[str, list[list[list[int]] | None]]) -> None:
    note = (
        f"ids that llama.cpp gave (/tokenize of xllamacpp {version('xllamacpp')}; SmolLM2 vocabulary, tokenizer.ggml.pre set "
        "to each name): [as plain text, with special tokens parsed]; null where equal to the first name's; some names have "
        "the first texts only"
    )

    def lines(rows: list) -> str:
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"

    ids = ",\n".join(f"{json.dumps(name)}: {lines(rows)}" for name, rows in found.items())
    FILE.write_text(f'{{"note": {json.dumps(note)},\n"texts": {lines(texts)},\n"ids": {{\n{ids}\n}}}}\n', "utf-8")


if __name__ == "__main__":
    main()
