"""Tasks to measure hand-overs on: a question about a context with its answer, read from a JSONL file.

It knows texts and files; no models and no handles.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from langgraph_latent.errors import ConfigError
from langgraph_latent.handle.message import Message

FIELDS = ("context", "question", "answer")


@dataclass(frozen=True)
class Task:
    """A question about a context with its answer; `place` says where it is from."""

    context: str
    question: str
    answer: str
    place: str = "a task"

    @property
    def asked(self) -> list[Message]:
        """The question as messages."""
        return [{"role": "user", "content": self.question}]

    def read(self, system: str = "") -> list[Message]:
        """The context as messages, led by a system prompt if there is one."""
        context: list[Message] = [{"role": "user", "content": self.context}]
        return [{"role": "system", "content": system}, *context] if system else context


def read_tasks(file: str | Path) -> list[Task]:
    """The tasks of a JSONL file: an object a line with text under "context", "question" and "answer".

    Raises `ConfigError`, naming file and line, for a file that can't be read or holds none, a line that is not such an
    object, and a field that is missing or empty.
    """
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"the tasks can't be read: {error}") from error
    tasks = [_task(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise ConfigError(f"{file}, line 1: there is no task; write one JSON object a line, with {', '.join(FIELDS)}")
    return tasks


def _task(line: bytes, place: str) -> Task:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not a JSON object: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{place} is not a JSON object, but {type(record).__name__}; write {', '.join(FIELDS)}")
    for name in FIELDS:
        if name not in record:
            raise ConfigError(f"{place} has no {name!r}; a task needs {', '.join(FIELDS)}")
        if not isinstance(record[name], str) or not record[name].strip() or not _is_unicode(record[name]):
            raise ConfigError(f"{place}: {name!r} is {record[name]!r}; it must be text, and not empty")
    return Task(record["context"], record["question"], record["answer"], place)


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can write and no tokenizer reads."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)
