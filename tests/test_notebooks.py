"""Every notebook runs from its first cell to its last in this Python, and is stored without outputs."""

import os
import platform
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel of this very Python, which knows nothing of the user's Jupyter and leaves nothing there."""
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return "python3"


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_first_latent_edge(kernel: str, smollm2: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "01_first_latent_edge.ipynb", as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert "assert text_answers == latent_answers" in sources, "the notebook itself checks that the answers are equal"

    client = NotebookClient(notebook, kernel_name=kernel, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises where a cell does

    versions = notebook.metadata["language_info"]["version"]
    assert versions == platform.python_version()
    figures = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(figures) == 1, "the time line was drawn"
    printed = "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")
    reused = [int(line.split()[-1]) for line in printed.splitlines() if line.startswith("latent ")]
    assert reused[0] < 10, "the planner read all of it"
    assert min(reused[1:]) > 900, "executor and reviewer did not read the report again"
