"""A process that forks, as servers with workers do: the child asks models as its parent does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, os, sys, threading
from langgraph_latent import ChatLatent, LatentWorkspace

chat = ChatLatent(model=sys.argv[1], workspace=LatentWorkspace(), max_tokens=8).load()
answer = asyncio.run(chat.ainvoke("the team")).text
begun, go = threading.Event(), threading.Event()

def hold(*_):
    begun.set()
    go.wait(60)

if sys.argv[2] == "within a call":
    hook = chat.resident().model.model.layers[0].register_forward_pre_hook(hold)
    thread = threading.Thread(target=lambda: chat.invoke("another"), daemon=True)
    thread.start()
    begun.wait(60)
    hook.remove()
child = os.fork()
if not child:
    same = asyncio.run(chat.ainvoke("the team")).text == answer and chat.invoke("the team").text == answer
    same = same and [reply.text for reply in chat.batch(["the team"] * 3)] == [answer] * 3
    os._exit(0 if same else 1)
go.set()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("when", ["after calls", "within a call"])
def test_a_forked_child_asks_the_models_of_its_parent(tiny_folder: Callable[..., Path], when: str) -> None:
    """Also where a thread of the parent, which the child does not have, ran a call or held a lock."""
    command = [sys.executable, "-c", SCRIPT, str(tiny_folder("llama")), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
