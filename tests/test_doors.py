"""Bad input to the public API: every argument of every public function gets values that it cannot accept.

The function must raise a ``SlimKVError`` that names the argument or the value, or return a result if the value happens
to be valid. Anything else (an internal ``AttributeError``, an ``IndexError``, a crash) is a bug.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import slimkv
from slimkv import AttentionBatch, Codec, CodecSpec, KVCacheConfig, LatentSpec, PagedPool, PageLayout, TensorFormat, ops
from slimkv.errors import SlimKVError
from slimkv.lab import models
from slimkv.ops import AttendOptions, PackedKV, Rounding

SPEC = CodecSpec.parse("k4v4", 32)
LAYOUT = PageLayout(SPEC, 16)
LATENTS = PageLayout(LatentSpec.parse("c4r8", 64, 32), 16)
META = torch.device("meta")


class Strange:
    """An object of an unexpected type."""

    def __repr__(self) -> str:
        return "<something strange>"


# A few values of every kind. Huge sizes are left out: they are valid, but would allocate terabytes.
VALUES = [None, "wrong", "", 2.5, float("nan"), -1, 0, True, [], {}, (), Strange(), b"bytes", torch.float64, 3 + 0j]
TENSORS = [
    torch.tensor(1.0), torch.zeros(0), torch.zeros(3, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.bool),
    torch.zeros(5, 2, 32), torch.zeros(5, 2, 32, dtype=torch.int8), torch.zeros(5, 2, 64)[..., ::2],
    torch.zeros(4, 2, 32, device=META), torch.zeros(4, dtype=torch.int64, device=META),
    torch.full((4,), 10**6, dtype=torch.int64), torch.full((1, 2), 10**6, dtype=torch.int32),
    torch.full((1,), -5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)[::2],
]  # fmt: skip


def pages() -> torch.Tensor:
    return torch.zeros(3, 2, LAYOUT.page_bytes, dtype=torch.uint8)


def batch() -> AttentionBatch:
    return AttentionBatch.build([[0, 1]], [20], [4], 16, "cpu")


def kv_arguments() -> dict[str, Any]:
    return {"pages": pages(), "codec": Codec(SPEC), "layout": LAYOUT, "key_offset": None}


def batch_arguments() -> dict[str, Any]:
    made = batch()
    return {
        "block_table": made.block_table, "seq_lens": made.seq_lens, "cu_seqlens_q": made.cu_seqlens_q,
        "max_query_len": 4, "max_seq_len": 20,
    }  # fmt: skip


def attend_arguments() -> dict[str, Any]:
    return {
        "query": torch.zeros(4, 4, 32), "kv": PackedKV(**kv_arguments()), "batch": batch(), "options": None,
        "fresh": None, "out": None, "lse": None, "workspace": None, "num_splits": None, "backend": None,
    }  # fmt: skip


def latents_arguments() -> dict[str, Any]:
    pages = torch.zeros(3, 1, LATENTS.page_bytes, dtype=torch.uint8)
    return {"pages": pages, "codec": Codec(LATENTS.spec), "layout": LATENTS, "key_offset": None}


def attend_latent_arguments() -> dict[str, Any]:
    return {
        "query_latent": torch.zeros(4, 4, 64), "query_rope": torch.zeros(4, 4, 32),
        "kv": PackedKV(**latents_arguments()), "batch": batch(), "softmax_scale": 0.1, "query_is_rotated": False,
        "output_is_rotated": False, "out": None, "lse": None, "workspace": None, "num_splits": None, "backend": None,
    }  # fmt: skip


def store_arguments() -> dict[str, Any]:
    kv = torch.zeros(4, 2, 32)
    return {
        "key": kv, "value": kv.clone(), "kv": PackedKV(**kv_arguments()), "slot_mapping": torch.arange(4),
        "rounding": None, "backend": None,
    }  # fmt: skip


def pool() -> PagedPool:
    return PagedPool(SPEC, 3, 2, 16)


@cache
def model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, head_dim=16, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def cache_of_a_model(batch: int = 2):
    made = slimkv.SlimKVCache(model().config, "k4v4", block_size=16)
    for layer in range(2):
        made.update(torch.zeros(batch, 1, 3, 16), torch.zeros(batch, 1, 3, 16), layer)
    return made


@cache
def prompt_file() -> Path:
    return cache_of_a_model(1).save(Path(tempfile.mkdtemp()) / "prompt", model(), [1, 2, 3])


def plan(function, arguments: dict[str, Any]):
    return function(**{k: v for k, v in arguments.items() if k in inspect.signature(function).parameters})


CODEC = Codec(SPEC)
ENCODED = CODEC.encode_key(torch.zeros(2, 32))
# name: (function, valid arguments)
DOORS: dict[str, tuple[Any, Any]] = {
    "Codec": (Codec, lambda: {"spec": SPEC, "device": "cpu"}),
    "Codec.from_format": (
        Codec.from_format,
        lambda: {"format": "k4v4", "head_dim": 32, "value_dim": None, "device": "cpu"},
    ),
    "Codec.to": (CODEC.to, lambda: {"device": "cpu"}),
    "Codec.compression_ratio": (CODEC.compression_ratio, lambda: {"block_size": 16}),
    "Codec.encode_key": (CODEC.encode_key, lambda: {"x": torch.zeros(2, 32), "query_aware": None}),
    "Codec.encode_value": (CODEC.encode_value, lambda: {"x": torch.zeros(2, 32)}),
    "Codec.decode_key": (CODEC.decode_key, lambda: {"encoded": ENCODED}),
    "Codec.decode_value": (CODEC.decode_value, lambda: {"encoded": ENCODED}),
    "Codec.pack_key": (CODEC.pack_key, lambda: {"x": torch.zeros(2, 32)}),
    "Codec.pack_value": (CODEC.pack_value, lambda: {"x": torch.zeros(2, 32)}),
    "Codec.unpack_key": (CODEC.unpack_key, lambda: {"rows": torch.zeros(2, 18, dtype=torch.uint8)}),
    "Codec.unpack_value": (CODEC.unpack_value, lambda: {"rows": torch.zeros(2, 18, dtype=torch.uint8)}),
    "Codec.rotate_query": (CODEC.rotate_query, lambda: {"q": torch.zeros(2, 32)}),
    "Codec.rotate_value": (CODEC.rotate_value, lambda: {"value": torch.zeros(2, 32)}),
    "Codec.unrotate_output": (CODEC.unrotate_output, lambda: {"out": torch.zeros(2, 32)}),
    "CodecSpec": (
        CodecSpec,
        lambda: {"key": SPEC.key, "value": SPEC.value, "key_dim": 32, "value_dim": 32, "seed": 0},
    ),
    "CodecSpec.parse": (
        CodecSpec.parse,
        lambda: {
            "format": "k4v4",
            "head_dim": 32,
            "value_dim": None,
            "key_policy": None,
            "value_policy": None,
            "seed": 0,
        },
    ),
    "CodecSpec.with_raw_dtype": (CodecSpec.parse("raw", 32).with_raw_dtype, lambda: {"dtype": "float16"}),
    "PageLayout": (PageLayout, lambda: {"spec": SPEC, "block_size": 16}),
    "PageLayout.pool_bytes": (LAYOUT.pool_bytes, lambda: {"blocks": 2, "num_kv_heads": 2}),
    "PageLayout.blocks_for": (LAYOUT.blocks_for, lambda: {"tokens": 5}),
    "TensorFormat": (
        TensorFormat,
        lambda: {
            "kind": SPEC.key.kind,
            "bits": 4,
            "rotated": True,
            "policy": SPEC.key.policy,
            "raw_dtype": "bfloat16",
        },
    ),
    "KVCacheConfig": (KVCacheConfig, lambda: {f.name: getattr(KVCacheConfig(), f.name) for f in fields(KVCacheConfig)}),
    "KVCacheConfig.parse": (KVCacheConfig.parse, lambda: {"given": "k4v4"}),
    "PagedPool": (
        PagedPool,
        lambda: {
            "spec": SPEC,
            "blocks": 3,
            "num_kv_heads": 2,
            "block_size": 16,
            "device": "cpu",
            "backend": None,
            "query_aware": None,
        },
    ),
    "PagedPool.store": (
        lambda **given: pool().store(**given),
        lambda: {**{k: store_arguments()[k] for k in ("key", "value", "slot_mapping")}, "query_aware_index": None},
    ),
    "PagedPool.attend": (
        lambda **given: pool().attend(**given),
        lambda: {"query": torch.zeros(4, 4, 32), "batch": batch(), "options": None},
    ),
    "PagedPool.gather": (
        lambda **given: pool().gather(**given),
        lambda: {"slots": torch.arange(3), "dtype": torch.float32},
    ),
    "PagedPool.grow": (lambda **given: pool().grow(**given), lambda: {"blocks": 5}),
    "PagedPool.copy_blocks": (lambda **given: pool().copy_blocks(**given), lambda: {"source": [0], "target": [1]}),
    "PagedPool.move_tokens": (
        lambda **given: pool().move_tokens(**given),
        lambda: {"source": torch.tensor([0]), "target": torch.tensor([1])},
    ),
    "AttentionBatch.build": (
        AttentionBatch.build,
        lambda: {"blocks": [[0, 1]], "seq_lens": [20], "query_lens": [4], "block_size": 16, "device": "cpu"},
    ),
    "AttendOptions": (
        AttendOptions,
        lambda: {"softmax_scale": None, "causal": True, "sliding_window": None, "softcap": 0.0, "sinks": None},
    ),
    "attend": (ops.attend, attend_arguments),
    "store_kv": (ops.store_kv, store_arguments),
    "gather_kv": (
        ops.gather_kv,
        lambda: {
            "kv": PackedKV(**kv_arguments()),
            "slots": torch.arange(3),
            "dtype": torch.float32,
            "out": None,
            "backend": None,
        },
    ),
    # These classes only check argument types. The operations that receive them reject bad shapes and devices.
    "PackedKV": (
        lambda **given: ops.gather_kv(PackedKV(**given), torch.arange(3)),
        kv_arguments,
    ),
    "AttentionBatch": (
        lambda **given: ops.attend(torch.zeros(4, 4, 32), PackedKV(**kv_arguments()), AttentionBatch(**given)),
        batch_arguments,
    ),
    "Rounding": (
        lambda **given: ops.store_kv(**{**store_arguments(), "rounding": Rounding(**given)}),
        lambda: {"matrices": torch.zeros(2, 32, 32, dtype=torch.int8), "index": None},
    ),
    "read_tokens": (
        ops.read_tokens,
        lambda: {"pages": pages(), "slots": torch.arange(3), "layout": LAYOUT, "backend": None},
    ),
    "write_tokens": (
        ops.write_tokens,
        lambda: {
            "rows": torch.zeros(3, 2, LAYOUT.row_bytes, dtype=torch.uint8),
            "pages": pages(),
            "slots": torch.arange(3),
            "layout": LAYOUT,
            "backend": None,
        },
    ),
    "copy_tokens": (
        ops.copy_tokens,
        lambda: {
            "pages": pages(),
            "source": torch.arange(3),
            "target": torch.arange(3) + 5,
            "layout": LAYOUT,
            "backend": None,
        },
    ),
    "plan_attend": (
        ops.plan_attend,
        lambda: {k: v for k, v in attend_arguments().items() if k in inspect.signature(ops.plan_attend).parameters},
    ),
    "AttendPlan.run": (
        lambda **given: plan(ops.plan_attend, attend_arguments()).run(**given),
        lambda: {"query": torch.zeros(4, 4, 32), "seq_lens": batch().seq_lens, "out": None},
    ),
    "plan_store": (ops.plan_store, store_arguments),
    "StorePlan.run": (
        lambda **given: plan(ops.plan_store, store_arguments()).run(**given),
        lambda: {**{k: store_arguments()[k] for k in ("key", "value", "slot_mapping")}, "index": None},
    ),
    "LatentSpec.parse": (LatentSpec.parse, lambda: {"format": "c4", "latent_dim": 64, "rope_dim": 32}),
    "latent_rotation": (ops.latent_rotation, lambda: {"codec": Codec(LATENTS.spec)}),
    "attend_latent": (ops.attend_latent, attend_latent_arguments),
    "store_latent": (
        ops.store_latent,
        lambda: {
            "latent": torch.zeros(4, 64),
            "rope": torch.zeros(4, 32),
            "kv": PackedKV(**latents_arguments()),
            "slot_mapping": torch.arange(4),
            "backend": None,
        },
    ),
    "gather_latent": (
        ops.gather_latent,
        lambda: {
            "kv": PackedKV(**latents_arguments()),
            "slots": torch.arange(3),
            "dtype": torch.float32,
            "rotated": False,
            "out": None,
            "backend": None,
        },
    ),
    "PackedKV of latents": (
        lambda **given: ops.gather_latent(PackedKV(**given), torch.arange(3)),
        latents_arguments,
    ),
    "AttentionBatch of latents": (
        lambda **given: ops.attend_latent(**{**attend_latent_arguments(), "batch": AttentionBatch(**given)}),
        batch_arguments,
    ),
    "latent_workspace_bytes": (
        ops.latent_workspace_bytes,
        lambda: {
            "layout": LATENTS,
            "total_queries": 4,
            "sequences": 1,
            "num_heads": 4,
            "max_query_len": 4,
            "num_splits": 2,
            "device": torch.device("cpu"),
        },
    ),
    "merge_attention_states": (
        ops.merge_attention_states,
        lambda: {name: (torch.zeros(3, 2, 8), torch.zeros(3, 2)) for name in ("one", "other")},
    ),
    "workspace_bytes": (
        ops.workspace_bytes,
        lambda: {
            "layout": LAYOUT,
            "total_queries": 4,
            "sequences": 1,
            "num_heads": 4,
            "num_kv_heads": 2,
            "max_query_len": 4,
            "num_splits": 2,
            "device": torch.device("cpu"),
        },
    ),
    "Calibration.load": (slimkv.Calibration.load, lambda: {"path": __file__}),
    "SlimKVCache": (
        lambda **given: slimkv.SlimKVCache(**given),
        lambda: {"config": model().config, "format": "k4v4", "block_size": 16, "fresh": "codes", "calibration": None},
    ),
    "SlimKVCache.update": (
        lambda **given: cache_of_a_model().update(**given),
        lambda: {"key_states": torch.zeros(2, 1, 3, 16), "value_states": torch.zeros(2, 1, 3, 16), "layer_idx": 0},
    ),
    "SlimKVCache.crop": (lambda **given: cache_of_a_model().crop(**given), lambda: {"tokens_to_remove": -1}),
    "SlimKVCache.reorder_cache": (
        lambda **given: cache_of_a_model().reorder_cache(**given),
        lambda: {"beam_idx": torch.tensor([1, 0])},
    ),
    "SlimKVCache.batch_repeat_interleave": (
        lambda **given: cache_of_a_model().batch_repeat_interleave(**given),
        lambda: {"repeats": 2},
    ),
    "SlimKVCache.batch_select_indices": (
        lambda **given: cache_of_a_model().batch_select_indices(**given),
        lambda: {"indices": torch.tensor([1])},
    ),
    "SlimKVCache.load": (
        lambda **given: slimkv.SlimKVCache.load(**given),
        lambda: {"path": prompt_file(), "model": model(), "input_ids": None},
    ),
    "SlimKVCache.save": (
        lambda **given: cache_of_a_model(1).save(**given),
        lambda: {"path": prompt_file(), "model": model(), "input_ids": [1, 2, 3]},
    ),
    "attention": (
        lambda **given: slimkv.attention(**given).__enter__().__exit__(None, None, None),
        lambda: {"model": model()},
    ),
    "fake_quantize": (
        slimkv.fake_quantize,
        lambda: {
            "key": torch.zeros(1, 2, 3, 32),
            "value": torch.zeros(1, 2, 3, 32),
            "config": "k4v4",
            "calibration": None,
            "layer": 0,
            "num_layers": 1,
            "key_offset": None,
            "first_position": 0,
        },
    ),
    "enable": (lambda **given: slimkv.enable(**given), lambda: {"model": model(), "format": "k4v4"}),
    "disable": (slimkv.disable, lambda: {"model": model()}),
    "status": (slimkv.status, lambda: {"model": model()}),
    "models.load": (models.load, lambda: {"name_or_path": "nowhere", "device": "cpu"}),
    "models.folder": (models.folder, lambda: {"name": "nowhere"}),
}


def say(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return repr(value)


def told(message: str, argument: str, value: object) -> bool:
    """Whether a message contains a word of the argument's name, or describes the value."""
    words = {argument, argument.replace("_", " "), *argument.split("_")} - {"", "x", "q"}
    words |= {" file ."} if isinstance(value, str) and not value else set()
    if isinstance(value, torch.Tensor):
        words |= {str(value.dtype), str(list(value.shape)), str(value.device)}
        words |= {str(value.tolist())} if value.device.type == "cpu" else set()
    else:
        words |= {repr(value), str(value), type(value).__name__}
    return any(re.search(re.escape(word), message, re.IGNORECASE) for word in words if word)


@pytest.mark.parametrize("name", list(DOORS))
def test_every_argument_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some functions take a path and write there
    function, good = DOORS[name]
    problems = []
    for argument in good():
        for value in [*VALUES, *TENSORS]:
            if isinstance(value, str) and argument == "name_or_path":
                continue  # would be looked up on a hub
            given = {**good(), argument: value}
            try:
                function(**given)
            except SlimKVError as error:
                if len(str(error)) < 15 or not told(str(error), argument, value):
                    problems.append(f"{argument}={say(value)}: {error} (does not say what was wrong)")
            except Exception as error:  # any other type of error is what this test looks for
                problems.append(f"{argument}={say(value)}: {type(error).__name__}: {str(error)[:150]}")
    assert not problems, f"{name}\n" + "\n".join(problems)


def test_every_public_function_is_a_door():
    """DOORS covers every public callable and every operation."""
    walked = {name.split(".")[0] for name in DOORS}
    for name in slimkv.__all__:
        held = getattr(slimkv, name)
        if isinstance(held, type) and issubclass(held, Exception):
            continue
        if callable(held) and name not in ("Calibration", "Encoded", "ScalePolicy", "calibrate_model"):
            assert name in walked, name
    for name in ops.__all__:
        assert name in walked, name
