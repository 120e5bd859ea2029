"""Digests of a tokenizer's ids and of its chat template, from a folder's files or from what is loaded.

It knows transformers' file names and the form of a tokenizer.json; no tokenizer is made.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from langgraph_latent.errors import ModelLoadError
from langgraph_latent.spec.digest import read_json, remembered

VOCABULARY_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")


def tokenizer_digest(content: str) -> str:
    """SHA-256 of what a tokenizer.json's ids stand for: its vocabulary, merges and added tokens, however formatted.

    Normalizer, pre-tokenizer, decoder and post-processor are not in it: transformers rebuilds them by the tokenizer's
    class, so that a file and what is loaded from it differ in them; and a cache is valid by its ids.
    """
    rules = json.loads(content)
    if not isinstance(rules.get("model"), dict):  # a plain vocabulary
        return _sha256(json.dumps(rules, sort_keys=True))
    model = rules["model"]
    ids = {
        "vocab": model.get("vocab"),
        # written as pairs or as texts with a space
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ()],
        "added_tokens": sorted(rules.get("added_tokens") or (), key=lambda token: int(token["id"])),
    }
    return _sha256(json.dumps(ids, sort_keys=True))


def template_digest(template: object) -> str:
    """SHA-256 of a chat template, or of several by name."""
    return _sha256(str(template or ""))


def tokenizer_of(folder: Path) -> str:
    """The digest of a folder's tokenizer; "" where it holds none. Raises `ModelLoadError` for a damaged one."""
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            (digest,) = remembered(
                "token ids", [file], 1, lambda: (tokenizer_digest(file.read_text(encoding="utf-8")),)
            )
            return digest
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ModelLoadError(f"{file} is not a tokenizer: {error}") from error
    files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    parts = [f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return _sha256("|".join(parts)) if parts else ""


def template_of(folder: Path) -> str:
    """The digest of a folder's template, looked for as transformers does: a file of its own before the tokenizer's
    config; "" where there is neither."""
    alone, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if alone.is_file():
        return template_digest(alone.read_text(encoding="utf-8"))
    for file in (folder / "chat_template.json", settings):
        if file.is_file() and (template := read_json(file).get("chat_template")):
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}
            return template_digest(template)
    return template_digest("") if settings.is_file() else ""


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
