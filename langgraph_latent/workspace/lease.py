"""One user's lease of a model, from the first use to the end. It does not know what the model is used for."""

from __future__ import annotations

import threading

from langgraph_latent.engine.loader import ModelKey
from langgraph_latent.errors import ClosedError
from langgraph_latent.workspace.workspace import LatentWorkspace


class ModelLease:
    """A model in a workspace, as one chat model holds it. Safe in threads.

    Attributes:
        workspace: in which the model is held; None before the first use and after the end.
        key: the model's, settled on first use: the working directory may change later.
    """

    def __init__(self) -> None:
        self.workspace: LatentWorkspace | None = None
        self.key = ModelKey("")
        self._lock = threading.Lock()
        self._is_ended = False

    def begin(self, workspace: LatentWorkspace | None, key: ModelKey, *, probe: bool) -> LatentWorkspace:
        """The workspace (the process's default one for None), in which the model is resident from the first call on.

        Raises `ClosedError` after `end`, and `ModelLoadError`.
        """
        with self._lock:
            if self._is_ended:
                raise ClosedError("this ChatLatent was closed; make a new one")
            if self.workspace is None:
                self.key = self.key if self.key.name else key.canonical()
                owner = workspace or LatentWorkspace.default()
                owner.models.use(self.key, probe=probe)
                self.workspace = owner
            return self.workspace

    def end(self) -> None:
        """Give the model back. Ending twice is fine."""
        with self._lock:
            self._is_ended = True
            if self.workspace is not None:
                self.workspace.models.leave(self.key)
                self.workspace = None
