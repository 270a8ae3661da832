"""Which KV connectors may carry packed pages, checked when an engine starts.

A connector moves bytes without knowing their format, and pages read in another format give wrong answers without an
error. Everything that leaves the engine therefore carries a fingerprint: a shared folder is marked with it, NIXL's
handshake compares it, and for other connectors between processes the user states it on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from slimkv.calibration.identity import weights_digest
from slimkv.config import unknown_setting
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.vllm import compat
from slimkv.integrations.vllm.page_sizes import KERNEL_BLOCKS
from slimkv.spec import LatentSpec
from slimkv.wire import Fingerprint, LayerFingerprint, check_marker
from slimkv.wire.model import model_fields

PROMPTS, EXAMPLE_CONNECTOR = "SlimKVPromptConnector", "ExampleConnector"
WRITER = "vLLM"
STATED = "slimkv_fingerprint"  # keys of kv_connector_extra_config
WEIGHTS = "slimkv_weights"
UNCHECKED = "slimkv_unchecked"
LEAST_TOKENS = "save_min_tokens"  # an option of the prompt connector
# Connectors that move all caches of a layer, including an indexer's keys, which ExampleConnector omits.
CARRY_INDEXERS = {
    PROMPTS, compat.NATIVE_OFFLOAD, "SimpleCPUOffloadConnector", "MultiConnector", "NixlConnector", "NixlPullConnector",
    "NixlPushConnector",
}  # fmt: skip


def connectors(vllm_config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, extra config) of every connector, including those inside a MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    yield from _with_children(transfer.kv_connector, transfer.kv_connector_extra_config or {})


def _with_children(name: str, extra: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield name, extra
    if compat.CONNECTORS.get(name, (None, ""))[0] is compat.Rule.CHILDREN:
        for child in extra.get("connectors", ()):
            yield from _with_children(child["kv_connector"], child.get("kv_connector_extra_config") or {})


def check_connectors(vllm_config: Any) -> None:
    """Raises for connectors that cannot carry packed pages, and for unknown ones that the user did not vouch for."""
    sparse = _is_sparse(vllm_config.model_config)
    for name, extra in connectors(vllm_config):
        rule, why = compat.CONNECTORS.get(name, (None, ""))
        if rule is compat.Rule.REFUSED:
            raise UnsupportedError(f"the KV connector {name} cannot carry slimkv's packed pages: {why}")
        if sparse and rule is not None and name not in CARRY_INDEXERS:
            raise UnsupportedError(
                f"the KV connector {name} is not known to move the cache of an indexer (sparse latent attention) with "
                f"the latents: use {', '.join(sorted(CARRY_INDEXERS))}"
            )
        if rule is None and extra.get(UNCHECKED) is not True:
            known = ", ".join(n for n, (r, _) in compat.CONNECTORS.items() if r is not compat.Rule.REFUSED)
            raise UnsupportedError(
                f"slimkv does not know the KV connector {name}: if it looks into the blocks it moves, or lets engines "
                f"with other settings read them, answers are wrong without an error. Known are {known}. To use {name} "
                f'all the same, put "{UNCHECKED}": true into its kv_connector_extra_config'
            )
        if rule is None:
            compat.logger.warning("slimkv: the KV connector %s is used unchecked, as %s says.", name, UNCHECKED)
        if name == compat.NATIVE_OFFLOAD and extra.get("canonical_layout"):
            raise UnsupportedError(
                "canonical_layout takes blocks apart into rows of tokens, which packed pages do not have: leave it out"
            )
        if rule is compat.Rule.HANDSHAKE and not extra.get("enforce_handshake_compat", True):
            raise InputError(
                f"{name}: enforce_handshake_compat must stay on, because a peer with another format or other offsets "
                "would read packed pages as its own; leave it out"
            )
        if rule is compat.Rule.FOLDER and not isinstance(extra.get(compat.FOLDER_KEYS[name]), str):
            raise InputError(
                f"{name} needs a folder of its own for packed pages: put {compat.FOLDER_KEYS[name]!r} into its "
                "kv_connector_extra_config"
            )
        if name == PROMPTS:
            _check_prompt_options(extra)


def _check_prompt_options(extra: Mapping[str, Any]) -> None:
    known = [compat.FOLDER_KEYS[PROMPTS], LEAST_TOKENS, WEIGHTS]
    for option in extra:
        if option not in known:
            raise InputError(f"{PROMPTS}: {unknown_setting(option, known)}")
    least = extra.get(LEAST_TOKENS, 0)
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        raise InputError(f"{PROMPTS}: {LEAST_TOKENS} must be a number of tokens, not {least!r}")


def _is_sparse(model: Any) -> bool:
    """Whether an indexer, with a cache for its own keys, picks the tokens that layers attend to."""
    return getattr(getattr(model, "hf_text_config", None), "index_topk", None) is not None


def check_fingerprints(vllm_config: Any, block_size: int) -> None:
    """Marks and checks the folders that connectors share, and checks the fingerprints that the user states."""
    needing = [(name, extra) for name, extra in connectors(vllm_config) if _leaves_the_engine(name, extra)]
    if not needing:
        return
    fingerprint = engine_fingerprint(vllm_config, block_size)
    for name, extra in needing:
        if compat.CONNECTORS[name][0] is compat.Rule.HANDSHAKE:
            _state_in_handshake(vllm_config, fingerprint)
            continue
        folders, rest = _places(name, extra)
        for folder in folders:
            check_marker(folder, fingerprint, self_describing=name == PROMPTS)
        if rest:
            _check_stated(name, extra, fingerprint)


def pages_leave_the_engine(vllm_config: Any) -> bool:
    """Whether other processes, running now or later, read this engine's pages."""
    return any(_leaves_the_engine(name, extra) for name, extra in connectors(vllm_config))


def _leaves_the_engine(name: str, extra: Mapping[str, Any]) -> bool:
    rule = compat.CONNECTORS.get(name, (None, ""))[0]
    if name == compat.NATIVE_OFFLOAD and extra.get("spec_name") == compat.COLD_SPEC:
        return bool(extra.get("secondary_tiers"))
    if rule is compat.Rule.IN_PROCESS:
        return name == compat.NATIVE_OFFLOAD and extra.get("spec_name", compat.IN_MEMORY_SPEC) != compat.IN_MEMORY_SPEC
    return rule in (compat.Rule.FOLDER, compat.Rule.HANDSHAKE, compat.Rule.PEERS)


def _places(name: str, extra: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The folders that a connector shares, and whether it also sends pages elsewhere."""
    if name in compat.FOLDER_KEYS:
        return [extra[compat.FOLDER_KEYS[name]]], False
    if name == compat.NATIVE_OFFLOAD and extra.get("spec_name") == compat.TIERING_SPEC:
        tiers = extra.get("secondary_tiers") or []
        folders = [tier["root_dir"] for tier in tiers if tier.get("type") == "fs" and "root_dir" in tier]
        return folders, len(folders) < len(tiers)
    return [], True


def _state_in_handshake(vllm_config: Any, fingerprint: Fingerprint) -> None:
    """Puts the fingerprint and the number of ranks into NIXL's handshake. If the numbers differed, vLLM would split
    blocks by heads, which is untested."""
    formats = ",".join(sorted({layer.format for layer in fingerprint.layers}))
    ranks = vllm_config.parallel_config.tensor_parallel_size
    stated = f"slimkv {formats}, {ranks} ranks, fingerprint {fingerprint.hash}"
    compat.logger.info("slimkv: peers must have %s.", stated)
    compat.state_in_handshake(vllm_config.kv_transfer_config.engine_id, stated)


def _check_stated(name: str, extra: Mapping[str, Any], fingerprint: Fingerprint) -> None:
    stated = extra.get(STATED)
    if stated is None:
        raise InputError(
            f"{name} sends packed pages to other processes, which must read them in the same format: start each of "
            f'them with "{STATED}": "{fingerprint.hash}" in its kv_connector_extra_config. This is the fingerprint of '
            "this engine; a process with another one is refused"
        )
    if stated != fingerprint.hash:
        raise InputError(
            f"{name}: {STATED} is {stated}, but this engine's fingerprint is {fingerprint.hash}. Model, weights, "
            f"dtype, formats, seed and block size must be the same on both sides; here they are {fingerprint.to_json()}"
        )


def engine_fingerprint(vllm_config: Any, block_size: int) -> Fingerprint:
    """The fingerprint of this process's packed layers, with the KV heads of all ranks."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise UnsupportedError(
            "packed pages leave an engine with all layers and all tokens of a block: use tensor parallelism instead "
            "of pipeline or decode context parallelism with this KV connector"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    packed, indexed = packed_layers(vllm_config).values(), indexer_layers(vllm_config)
    layers = [
        LayerFingerprint.of(
            number, spec, 1 if isinstance(spec, LatentSpec) else all_heads(vllm_config, layer), dtype,
            layer.impl.sliding_window, layer.impl.whole_key_offset(), getattr(layer.impl, "token_rows", False),
            sum(size for of, size in indexed.values() if of == number),
        )
        for number, spec, layer in packed
    ]  # fmt: skip
    return Fingerprint.of(
        layers,
        block_size=block_size,
        seed=next(spec.seed for _, spec, _ in packed),
        dtype=dtype,
        model=model_fields(model.hf_text_config, WRITER),
        weights=engine_weights(vllm_config),
    )


def packed_layers(vllm_config: Any) -> dict[str, tuple[int, Any, Any]]:
    """(number, codec spec, layer) by name of the layers that own packed pages in this process."""
    found: dict[str, tuple[int, Any, Any]] = {}
    numbers: dict[int, str] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        spec = getattr(getattr(layer, "attn_backend", None), "codec_spec", None)
        if spec is None or getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        number = compat.layer_number(name)
        if number is None or number in numbers:
            other = f", and so has {numbers[number]}" if number is not None else ""
            raise UnsupportedError(f"{name} has the layer number {number}{other}: its pages cannot be identified")
        numbers[number] = name
        found[name] = number, spec, layer
    return found


def indexer_layers(vllm_config: Any) -> dict[str, tuple[int, int]]:
    """(layer number, bytes per token) of each cache of an indexer (sparse latent attention), by name."""
    found = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if hasattr(layer, "get_kv_cache_spec") and not hasattr(layer, "impl"):
            spec, number = layer.get_kv_cache_spec(vllm_config), compat.layer_number(name)
            if getattr(spec, "cache_role", None) == "indexer" and number is not None:
                found[name] = number, spec.real_page_size_bytes // spec.block_size
    return found


def all_heads(vllm_config: Any, layer: Any) -> int:
    """The KV heads of a layer over all ranks; ranks beyond the number of heads hold copies."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    total = vllm_config.model_config.get_total_num_kv_heads()
    if ranks == 1:
        return layer.num_kv_heads
    if layer.num_kv_heads != max(1, total // ranks):
        raise UnsupportedError(
            f"a layer has {layer.num_kv_heads} KV heads on each of {ranks} ranks, the model {total}: slimkv cannot "
            "assign heads to ranks; run without tensor parallelism"
        )
    return total


def engine_weights(vllm_config: Any) -> str:
    """A digest of the weight files, or of the name that the user gave the weights."""
    named = [extra[WEIGHTS] for _, extra in connectors(vllm_config) if WEIGHTS in extra]
    if named:
        return hashlib.sha256(f"named {named[0]}".encode()).hexdigest()
    digest = weights_digest(vllm_config.model_config.model)
    if digest is None:
        raise InputError(
            f"{vllm_config.model_config.model} contains no weight files, which identify the model of the pages that "
            f'leave this engine: put a name for the weights into kv_connector_extra_config, as in "{WEIGHTS}": "mine-1"'
        )
    return digest


def wants_cross_layer_blocks(vllm_config: Any) -> bool:
    """Whether a block should be contiguous across layers, so that the native offload copies it at once.

    False for hybrid models, because vLLM splits their blocks for the kernels; with layers of another backend; with a
    layout that the user chose; and with ExampleConnector, which would write latents into a copy.
    """
    names = {name for name, _ in connectors(vllm_config)}
    if compat.NATIVE_OFFLOAD not in names or EXAMPLE_CONNECTOR in names:
        return False
    model = vllm_config.model_config
    plain = not (model.is_hybrid or model.is_encoder_decoder or _is_sparse(model))
    return plain and vllm_config.cache_config.block_size in KERNEL_BLOCKS and not compat.layout_is_chosen()
