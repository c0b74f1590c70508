"""llama.cpp's own server, as the xllamacpp wheel brings it. Prints {"ready": ..., "url": ...} and runs until stdin ends.

    python llamacpp_server.py MODEL.gguf THREADS PARALLEL CONTEXT POLL

POLL is how hard a waiting thread looks for work: 50 is llama.cpp's own setting, 0 lets it sleep.

Run by bench/cpu.py in a virtual environment of its own; imports nothing of Baton.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import xllamacpp


def main() -> None:
    path, threads, parallel, context, poll = sys.argv[1], *map(int, sys.argv[2:6])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cpuparams.poll = params.cpuparams_batch.poll = poll
    params.n_parallel, params.n_ctx, params.kv_unified = parallel, context, True
    params.cache_prompt, params.cache_ram_mib, params.verbosity = False, 0, -1
    server = xllamacpp.Server(params)
    said = {"ready": f"llama.cpp (xllamacpp {version('xllamacpp')})", "url": server.listening_address}
    print(json.dumps(said), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
