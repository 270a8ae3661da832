"""Damaged and hostile calibration and prompt-cache files: loading raises a SlimKVError or gives what was written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis")
pytest.importorskip("safetensors")

from budget import count
from made_prompts import fingerprint, layer, prompt
from safetensors.torch import load_file, save_file

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity
from slimkv.calibration import file as calibration_file
from slimkv.calibration.rotary import Rotary
from slimkv.errors import SlimKVError
from slimkv.wire import PromptCache
from slimkv.wire.prompt_file import FORMAT, _raw_header, _sign

CORPUS = json.loads((Path(__file__).parent / "corpus" / "headers.json").read_text())
NESTED = "[" * 100_000
HOSTILE = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, 1e308, float("inf"), float("nan"), "", "x", "k4v4",
    "\0", "\ud800", [], {}, [[]], [None] * 7, {"": None}, "9" * 5000,
]  # fmt: skip
DTYPES = [torch.uint8, torch.int64, torch.float32, torch.float16, torch.bool, torch.float8_e4m3fn, torch.float64]


def statistics(number: int) -> LayerStatistics:
    moment = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    rotary = Rotary(torch.tensor([[0, 8], [1, 9]]), torch.tensor([1.0, 0.1], dtype=torch.float64))
    weight = torch.ones(2, dtype=torch.float64)
    return LayerStatistics(moment @ moment.mT, 16, weight, weight, rotary if number else Rotary.none(), None)


@pytest.fixture(scope="module")
def prompt_bytes(tmp_path_factory):
    mark = fingerprint(layer(0, dim=16), layer(3, "k5v3", dim=16, window=20))
    return prompt(mark, tokens=20).save(tmp_path_factory.mktemp("p") / "p").read_bytes()


@pytest.fixture(scope="module")
def calibration_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "c"
    identity = ModelIdentity.from_fields({"model_type": "llama", "head_dim": 16})
    made = Calibration(identity, {n: statistics(n) for n in range(2)}, "nothing", 512)
    made.with_formats({0: "k4v4", 1: "k3v3"}).save(path)
    return path.read_bytes()


def load_prompt(path):
    """The content of a file, which must be the same after saving and loading it again."""
    loaded = PromptCache.load(path)
    loaded.save(path)
    again = PromptCache.load(path)
    assert (again.tokens, again.fingerprint) == (loaded.tokens, loaded.fingerprint)
    return loaded.tokens, {n: x.pages.tolist() for n, x in loaded.layers.items()}


def load_calibration(path):
    loaded = Calibration.load(path)
    loaded.save(path)
    Calibration.load(path)
    return loaded.identity, loaded.formats, {n: x.query_moment.tolist() for n, x in loaded.layers.items()}


LOADERS = {"prompt": load_prompt, "calibration": load_calibration}


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """Flips bits; deletes, inserts, overwrites or repeats bytes, mostly in the header and its length."""
    data = bytearray(whole)
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        end = chance.choice((8, header, len(data)))
        start = chance.randrange(max(min(end, len(data)), 1))
        stop = start + chance.choice((1, 1, 2, 4, 8, 64))
        match chance.randrange(7):
            case 0 | 1:
                data[start % max(len(data), 1)] ^= 1 << chance.randrange(8)
            case 2:
                del data[start:stop]
            case 3:
                data[start:start] = chance.randbytes(stop - start)
            case 4:
                data[start:stop] = bytes([chance.choice((0, 0xFF, 0x7B, 0x22))]) * len(data[start:stop])
            case 5:
                del data[start:]
            case 6:
                data += data[start:stop]
        if not data:
            break
    return bytes(data)


def refused_or_same(kind: str, path: Path, wanted) -> bool:
    """Whether the file was refused. If not, it must hold ``wanted`` (None: anything that can be saved again)."""
    try:
        found = LOADERS[kind](path)
    except SlimKVError:
        return True
    assert wanted is None or found == wanted
    return False


def fuzz_bytes(kind: str, whole: bytes, path: Path, cases: int) -> None:
    path.write_bytes(whole)
    wanted = LOADERS[kind](path)
    for case in range(cases):
        path.write_bytes(damaged(whole, random.Random(case)))
        refused_or_same(kind, path, wanted)


@pytest.mark.parametrize("kind", list(LOADERS))
def test_random_damage(kind, request, tmp_path):
    fuzz_bytes(kind, request.getfixturevalue(f"{kind}_bytes"), tmp_path / "x", count(400))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(LOADERS))
def test_random_damage_at_length(kind, request, tmp_path):
    fuzz_bytes(kind, request.getfixturevalue(f"{kind}_bytes"), tmp_path / "x", count(50_000))


def places(value, at=()):
    """Paths to everything inside a JSON value."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from places(inner, (*at, name))


def replaced(value, at, new):
    if not at:
        return new
    if isinstance(value, dict):
        return {k: replaced(v, at[1:], new) if k == at[0] else v for k, v in value.items()}
    return [replaced(v, at[1:], new) if i == at[0] else v for i, v in enumerate(value)]


def write_prompt(path: Path, whole: bytes, about, change_tensors=None) -> None:
    """Writes a prompt file with any header and a valid signature."""
    path.write_bytes(whole)
    tensors = load_file(path)
    if change_tensors:
        change_tensors(tensors)
    text = about if isinstance(about, str) else json.dumps(about, sort_keys=True, separators=(",", ":"))
    try:
        save_file(tensors, path, metadata={FORMAT: text.encode("utf-8", "replace").decode()})
        _sign(path)
    except SlimKVError:
        pass  # it cannot be signed, but is hostile without a signature, too


def write_calibration(path: Path, whole: bytes, about, change_tensors=None) -> None:
    path.write_bytes(whole)
    tensors = load_file(path)
    if change_tensors:
        change_tensors(tensors)
    text = about if isinstance(about, str) else json.dumps(about, sort_keys=True)
    header = {"format": calibration_file.FORMAT, "version": str(calibration_file.VERSION)}
    header["about"] = text.encode("utf-8", "replace").decode()
    header["sha256"] = calibration_file._checksum(header, tensors)
    save_file(tensors, path, metadata=header)


WRITERS = {"prompt": write_prompt, "calibration": write_calibration}


def about_of(kind: str, whole: bytes, path: Path):
    path.write_bytes(whole)
    return _raw_header(path)[1] if kind == "prompt" else calibration_file.read(path)[0]


@pytest.mark.parametrize("kind", list(LOADERS))
def test_hostile_headers(kind, request, tmp_path):
    """Replaces one value of the header by a hostile one, for a sample of all pairs, and signs the file again."""
    whole, path = request.getfixturevalue(f"{kind}_bytes"), tmp_path / "x"
    about = about_of(kind, whole, path)
    every = [(at, new) for at in places(about) for new in HOSTILE]
    chosen = random.Random(0).sample(every, min(count(300), len(every)))
    refused = 0
    for at, new in chosen:
        WRITERS[kind](path, whole, replaced(about, at, new))
        refused += refused_or_same(kind, path, None)
    assert refused > len(chosen) // 2, "most of them make no sense"


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry["name"])
def test_headers_that_once_broke(entry, request, tmp_path):
    kind = entry["kind"]
    whole, path = request.getfixturevalue(f"{kind}_bytes"), tmp_path / "x"
    about = about_of(kind, whole, path)
    new = NESTED if entry["value"] == "nested" else float("inf") if entry["value"] == "infinity" else entry["value"]
    text = NESTED if not entry["at"] else replaced(about, tuple(entry["at"]), new)
    WRITERS[kind](path, whole, text)
    with pytest.raises(SlimKVError):
        LOADERS[kind](path)


@pytest.mark.parametrize("kind", list(LOADERS))
def test_hostile_tensors(kind, request, tmp_path):
    """Removes a tensor or replaces it by one of another dtype and shape, and signs the file again."""
    whole, path = request.getfixturevalue(f"{kind}_bytes"), tmp_path / "x"
    about = about_of(kind, whole, path)
    for case in range(count(150)):
        chance = random.Random(case)

        def change(tensors, chance=chance):
            name = chance.choice(sorted(tensors))
            shape = [chance.choice((0, 1, 2, 3, 16, 20)) for _ in range(chance.randrange(4))]
            if chance.random() < 0.3:
                shape = list(tensors[name].shape)
            fill, dtype = chance.choice((0.0, 1.0, 255.0, -1.0, float("nan"), float("inf"))), chance.choice(DTYPES)
            del tensors[name]
            if chance.random() < 0.9:
                tensors[name] = torch.full(shape, fill).to(dtype)

        WRITERS[kind](path, whole, about, change)
        refused_or_same(kind, path, None)


def test_safetensors_headers_of_any_shape(prompt_bytes, calibration_bytes, tmp_path):
    """Wrong offsets, shapes and dtypes in the header of the safetensors format itself."""
    path = tmp_path / "x"
    for kind, whole in (("prompt", prompt_bytes), ("calibration", calibration_bytes)):
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        every = [(at, new) for at in places(header) for new in HOSTILE if at]
        for at, new in random.Random(1).sample(every, min(count(200), len(every))):
            text = json.dumps(replaced(header, at, new)).encode("utf-8", "replace")
            path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
            refused_or_same(kind, path, None)
        for text in (NESTED.encode(), b"{}", b"", b"null", b"{" + b" " * 64 + b"}", b'{"a":' * 5000):
            for claimed in (len(text), 2**62, 2**64 - 1):
                path.write_bytes(claimed.to_bytes(8, "little") + text)
                with pytest.raises(SlimKVError):
                    LOADERS[kind](path)
