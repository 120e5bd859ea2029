"""Turns a GGUF file into a Hugging Face folder of fp32 safetensors.

It runs as a process of its own, so that its memory and its settings (`HF_HUB_OFFLINE`) end with it:

    python -m langgraph_latent.demo.convert FILE.gguf FOLDER
"""

import os
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` and save model and tokenizer in `folder`, an existing empty folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = gguf.resolve()
    # Saving to "." can't bring back a folder that somebody removed because our parent died.
    os.chdir(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain fp32 from here on: nothing saved may call them quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(".")
    tokenizer.save_pretrained(".")
    for path in Path().iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
