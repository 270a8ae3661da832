"""Weights loaded into a running engine: what belongs to the old ones is compared again, or new ones are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from engines import STOCK_LATENTS, connector, run_engine, slimkv
from mla_models import PROMPTS, deepseek_v2, saved
from observed import write_llama
from prompts import run
from safetensors.torch import load_file, save_file

import slimkv as package
from slimkv.calibration.guard import Guard
from slimkv.calibration.learned_offset import LayerOffset
from slimkv.codec import Codec
from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm import refusals
from slimkv.integrations.vllm.settings import parse
from slimkv.spec import CodecSpec

pytestmark = pytest.mark.vllm
KEEP = {"KEEP_CHUNKS": "1"}


def other_weights(folder: str, target: Path) -> str:
    """A copy of the model in ``folder`` with other weights."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    save_file({name: 1.5 * x for name, x in weights.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


# -- without an engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return write_llama(tmp_path / "model")


def config_of(folder, settings, layers=(), transfer=None):
    return SimpleNamespace(
        additional_config={"slimkv": settings}, model_config=SimpleNamespace(model=folder),
        kv_transfer_config=transfer and SimpleNamespace(**transfer["kv_transfer_config"]),
        compilation_config=SimpleNamespace(static_forward_context={i: x for i, x in enumerate(layers)}),
    )  # fmt: skip


@pytest.mark.parametrize("why", ["calibration", "fingerprint"])
def test_other_weights_than_those_of_the_calibration_are_refused(folder, tmp_path, why):
    store = connector("SlimKVPromptConnector", tmp_path / "store") if why == "fingerprint" else None
    config = config_of(folder, {"calibration": "auto"} if why == "calibration" else {}, transfer=store)
    refusals.watch_weights(config, parse(config.additional_config))
    refusals.check_new_weights(config)
    refusals.check_new_weights(config, None, str(shutil.copytree(folder, tmp_path / "copy")))
    for given in ({"weights_path": other_weights(folder, tmp_path / "other")}, {"weights_iterator": iter(())}):
        with pytest.raises(UnsupportedError, match="belongs to the weights that this engine started with"):
            refusals.check_new_weights(config, **given)
    weights = load_file(Path(folder, "model.safetensors"))
    save_file({name: x + 1 for name, x in weights.items()}, Path(folder, "model.safetensors"))
    with pytest.raises(UnsupportedError, match="others are to be loaded: start an engine with the new weights"):
        refusals.check_new_weights(config)  # a trainer has written to the same folder


def test_layers_are_compared_again_and_offsets_of_new_weights_are_not_saved(tmp_path):
    guard = Guard(4.0, ["0", "1"])
    guard.figures.update({"0": 0.1, "1": 0.1})
    guard.expect("0")
    assert [guard.wants(layer, 512) for layer in "01"] == [True, False]
    for path in (tmp_path / "first", tmp_path / "later"):
        offset = LayerOffset.kept(path, 2, Codec(CodecSpec.parse("k4v4", 64)))
        if path.name == "later":
            offset.file = None
        offset.learn(torch.randn(20, 2, 64), torch.ones(20, dtype=torch.bool), torch.zeros(4, 16))
        assert offset.known
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_weights_that_do_not_reach_the_folded_projections_are_refused(folder):
    latent = SimpleNamespace(impl=SimpleNamespace(absorbed_weights_ready=print))
    config = config_of(folder, "c4", [latent])
    refusals.check_new_weights(config, iter(()))
    with pytest.raises(UnsupportedError, match="is_checkpoint_format=False does not change: leave it out"):
        refusals.check_new_weights(config, iter(()), is_checkpoint_format=False)
    refusals.check_new_weights(config_of(folder, "k4v4", [SimpleNamespace(impl=None)]), iter(()), None, False)


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_loads_weights_again(folder, tmp_path):
    """Other weights answer as in an engine of their own; with a calibration only the same ones are loaded."""
    other = other_weights(folder, tmp_path / "other")
    base = {"skip_tokenizer_init": True, "max_model_len": 512}
    runs = [
        run("before", PROMPTS, 8),
        run("same", PROMPTS, 8, reset=True, reload={}),
        run("other", PROMPTS, 8, reset=True, reload={"weights_path": other}),
    ]
    want = run_engine({"model": other, **base, **slimkv("raw")}, [run("other", PROMPTS, 8)])
    plain = run_engine({"model": folder, **base, **slimkv("raw")}, runs)
    assert not plain["refused"]
    assert plain["tokens"]["same"] == plain["tokens"]["before"] != plain["tokens"]["other"]
    assert plain["tokens"]["other"] == want["tokens"]["other"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    package.calibrate_model(model, samples=(2, 64)).save(tmp_path / "made.safetensors")
    how = slimkv("k4v4", calibration=str(tmp_path / "made.safetensors"))
    bound = run_engine({"model": folder, **base, **how}, runs)
    assert list(bound["refused"]) == ["other"]
    assert "belongs to the weights that this engine started with" in bound["refused"]["other"]
    assert bound["tokens"]["other"] == bound["tokens"]["same"] == bound["tokens"]["before"], "still the old weights"


@pytest.mark.slow
def test_latents_add_nothing_to_the_weights_that_vllm_sees(tmp_path):
    """Parameters have the stock names and, but for the folded projections, the stock digests, before and after."""
    base = {"model": saved(deepseek_v2, tmp_path / "model"), "skip_tokenizer_init": True, "block_size": 16}
    runs = [run("once", PROMPTS, 8, checksums=True), run("again", PROMPTS, 8, reset=True, reload={}, checksums=True)]
    stock, ours = (run_engine({**base, **how}, runs, **KEEP) for how in (STOCK_LATENTS, slimkv("c4")))
    assert not ours["refused"]
    once, again, theirs = ours["checksums"]["once"], ours["checksums"]["again"], stock["checksums"]["once"]
    assert once == again
    assert ours["tokens"]["once"] == ours["tokens"]["again"]
    assert once.keys() == theirs.keys()
    changed = {name.rsplit(".", 1)[1] for name in once if once[name] != theirs[name]}
    assert changed == {"W_UK_T", "W_UV"}
