"""A GGUF file as a Hugging Face folder in float32, for engines that read only those.

    python gguf_to_folder.py MODEL.gguf FOLDER

Run by bench/cpu.py with transformers' environment; imports nothing of Baton.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    weights = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).state_dict()
    config = AutoConfig.from_pretrained(**where)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # the loaded one remembers that it was quantised
    plain.load_state_dict(weights)
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main()
