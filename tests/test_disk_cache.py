"""Where files are kept: for users without a home directory too, as containers have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from langgraph_latent.disk_cache import cache_dir

NOBODY = 54321
"""A user id without an entry in the list of users."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
SCRIPT = """
import os
from langgraph_latent.disk_cache import DiskCache, cache_dir
from langgraph_latent.errors import ConfigError
os.setgid(54321), os.setuid(54321)  # only now: it may not be allowed to read this Python's own folder
try:
    print(cache_dir())
    DiskCache("x.json").put("a", 1)
    print(DiskCache("x.json").get("a"))
except ConfigError as error:
    print("ConfigError", error)
"""


def as_nobody(tmp: Path) -> list[str]:
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp), "PYTHONPATH": paths}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which everybody may write, as /tmp is."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001 and folder != Path("/"):
            folder.chmod(0o711)
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@needs_root
def test_a_user_without_home_and_entry_keeps_files_in_a_folder_of_its_own(shared: Path) -> None:
    assert as_nobody(shared) == [str(shared / f"langgraph-latent-{NOBODY}"), "1"]
    assert as_nobody(shared) == [str(shared / f"langgraph-latent-{NOBODY}"), "1"]
    assert (shared / f"langgraph-latent-{NOBODY}").stat().st_mode & 0o777 == 0o700


@needs_root
@pytest.mark.parametrize("how", ["somebody else's folder", "a link", "a file"])
def test_a_name_that_somebody_else_took_is_refused(how: str, shared: Path) -> None:
    taken = shared / f"langgraph-latent-{NOBODY}"
    if how == "a link":
        (shared / "there").mkdir(mode=0o777)
        taken.symlink_to(shared / "there")
    elif how == "a file":
        taken.touch()
    else:
        taken.mkdir(mode=0o777)
    (said,) = as_nobody(shared)
    assert said.startswith("ConfigError")
    assert "LANGGRAPH_LATENT_CACHE" in said


def test_what_is_set_is_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/langgraph-latent")
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", "/own")
    assert cache_dir() == Path("/own")
