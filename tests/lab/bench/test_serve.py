"""``slimkv bench serve``: plans, failures and tables without an engine, and small runs with installed engines."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slimkv.errors import InputError, SlimKVError
from slimkv.lab.bench import serve
from slimkv.lab.bench.serve import bench_serve, over_stock, table_rows
from slimkv.lab.bench.serve_engine import percentile
from slimkv.lab.bench.serve_settings import SHAPES, ServeSettings, cache_arguments, engine_plan
from slimkv.lab.bench.sessions import Sessions, held_tokens
from slimkv.memory_plan import read_config
from tail import sample

BF16 = {"kv_tokens": 100, "start_seconds": 10.0, "decode": {"decode_tokens_per_second": 50.0, "prefill_seconds": 2.0}}
SLIM = {"kv_tokens": 388, "start_seconds": 12.5, "decode": {"decode_tokens_per_second": 75.0, "prefill_seconds": 2.2}}


@pytest.mark.parametrize(
    ("system", "arguments"),
    [
        ("bf16", {"kv_cache_dtype": "auto"}),
        ("fp8", {"kv_cache_dtype": "fp8"}),
        ("turboquant_4bit_nc", {"kv_cache_dtype": "turboquant_4bit_nc"}),
        ("bf16:FLASHMLA", {"kv_cache_dtype": "auto", "attention_backend": "FLASHMLA"}),
        ("c4r8", {"attention_backend": "CUSTOM", "additional_config": {"slimkv": {"format": "c4r8"}}}),
        ("k4v4", {"attention_backend": "CUSTOM", "additional_config": {"slimkv": {"format": "k4v4"}}}),
        (
            "k4v4:triton",
            {"attention_backend": "CUSTOM", "additional_config": {"slimkv": {"format": "k4v4", "backend": "triton"}}},
        ),
    ],
)
def test_systems(system, arguments):
    assert cache_arguments(system) == arguments


def test_prefill_is_slimkvs_alone():
    assert cache_arguments("bf16", prefill="8bit") == {"kv_cache_dtype": "auto"}
    settings = cache_arguments("k4v4", prefill="8bit")["additional_config"]["slimkv"]
    assert settings == {"format": "k4v4", "prefill": "8bit"}
    with pytest.raises(InputError, match="not '4bit'"):
        ServeSettings(systems=("k4v4",), prefill="4bit")


@pytest.mark.parametrize(
    ("system", "arguments"),
    [
        ("fp8", {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch_native"}),
        (
            "k4v4:triton",
            {
                "attention_backend": "slimkv",
                "page_size": 64,
                "json_model_override_args": '{"slimkv": {"format": "k4v4", "backend": "triton"}}',
            },
        ),
    ],
)
def test_systems_in_sglang(system, arguments, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cache_arguments(system, "sglang") == arguments


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engine": "tgi"}, "unknown engine 'tgi'; known are vllm, sglang"),
        ({"engine": "sglang", "systems": ("turboquant_2bit",)}, "unknown format"),
        ({"engine": "sglang", "phases": ("offload",)}, "the phases offload and sessions, memory layouts .* are vLLM's"),
        ({"systems": ("k9v9",)}, "unknown format 'k9v9'"),
        ({"phases": ("sleep",)}, "unknown phase 'sleep'; known are decode, full, poisson, offload"),
        ({"shape": "huge"}, "unknown shape 'huge'"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"new_tokens": 1}, "--new-tokens must be at least 2"),
        ({"rate": 0.0}, "rate must be a positive number"),
    ],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(SlimKVError, match=message):
        ServeSettings(**wrong)


@pytest.mark.parametrize(("engine", "longest"), [("vllm", "max_model_len"), ("sglang", "context_length")])
def test_a_plan_is_the_same_for_every_system_but_for_its_cache(engine, longest, tmp_path):
    settings = ServeSettings(engine=engine)
    plans = [engine_plan(system, settings, tmp_path) for system in ("bf16", "k4v4")]
    for plan, system in zip(plans, ("bf16", "k4v4"), strict=True):
        for name in cache_arguments(system, engine):
            del plan["arguments"][name]
        del plan["system"]
    assert plans[0] == plans[1]
    assert plans[0]["arguments"][longest] >= settings.context + settings.new_tokens


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ("llama-3.1-8b", [("full", 32, 8, 128)]),
        ("qwen2.5-7b", [("full", 28, 4, 128)]),
        ("gemma-3", [("full", 8, 8, 256), ("sliding", 40, 8, 256)]),
        ("gpt-oss-20b", [("full", 12, 8, 64), ("sliding", 12, 8, 64)]),
        ("deepseek-v2-lite", [("latent", 27, 1, 512)]),
    ],
)
def test_shapes_have_the_cache_of_their_models(shape, groups, tmp_path):
    """``slimkv plan`` reads the configuration written for an engine, which also works as a user's own shape."""
    serve.write_model(tmp_path, shape)
    found = [(g.kind, g.layers, g.num_kv_heads, g.key_dim) for g in read_config(tmp_path).groups]
    assert found == groups
    settings = ServeSettings(shape=str(tmp_path))
    plan = engine_plan("bf16", settings, tmp_path)
    assert plan["vocabulary"] == SHAPES[shape]["vocab_size"]
    assert plan["arguments"]["max_model_len"] >= settings.context + settings.new_tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_reads_every_shape(shape, tmp_path):
    transformers = pytest.importorskip("transformers")
    serve.write_model(tmp_path, shape)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert hasattr(transformers, config.architectures[0])
    assert config.num_hidden_layers == SHAPES[shape]["num_hidden_layers"]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "does not name an architecture"), (None, "unknown shape")]
)
def test_a_shape_that_is_no_configuration(text, message, tmp_path):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SlimKVError, match=message):
        ServeSettings(shape=str(file))


def test_ratios_and_table():
    ratios = over_stock({"bf16": BF16, "k4v4": SLIM})["k4v4"]
    assert ratios == pytest.approx(
        {"kv_tokens": 3.88, "decode_tokens_per_second": 1.5, "prefill_seconds": 1.1, "start_seconds_more": 2.5}
    )
    assert over_stock({"k4v4": SLIM}) == {}
    report = serve.ServeReport(
        ServeSettings(),
        {"bf16": BF16, "k4v4": {"error": "exit code 1: a log\nof lines\nx\n"}, "fp8": {"error": "exit code 2: "}},
        {"k4v4": {}},
        "d",
        {},
        "",
        "",
    )
    header, first, second, _ = table_rows(report)
    assert first[header.index("decode tok/s")] == "50"
    assert set(second[1:]) == {"-"}
    assert serve.notes(report)[:2] == ["k4v4 failed: exit code 1: x", "fp8 failed: exit code 2: no output"]


def test_sessions_are_the_same_for_every_system_and_grow():
    plan = {"seed": 1, "vocabulary": 500, "context": 400, "turns": 3, "new_tokens": 10, "users": 9, "think": 2.0}

    def played():
        sessions, seen = Sessions(plan), []
        waiting = list(sessions.first())
        while waiting:
            due, user, prompt = waiting.pop(0)
            seen.append((due, user, prompt))
            if (after := sessions.follow(user, [7] * 10, due + 1)) is not None:
                waiting.append(after)
        return sessions, seen

    sessions, seen = played()
    assert seen == played()[1]
    assert len(seen) == 9 * 3
    texts = {tuple(prompt[:200]) for _, _, prompt in seen}
    assert 1 < len(texts) <= 3
    for user in range(9):
        own = [(due, prompt) for due, who, prompt in seen if who == user]
        for (due, prompt), (later, longer) in pairwise(own):
            assert longer[: len(prompt) + 10] == [*prompt, *[7] * 10]
            assert later > due + 1
        assert len(own[-1][1]) + 10 <= 400
    assert sessions.prompt_tokens == sum(len(prompt) for _, _, prompt in seen)
    assert sessions.unseen == len(texts) * 200 + 27 * (200 // 3 - 10)
    assert held_tokens(9, 400, 3, 10) == 3 * 200 + 27 * (200 // 3)


def test_sessions_get_a_share_of_the_memory_that_holds_them(tmp_path):
    settings = ServeSettings(phases=("sessions",), users=64, context=8192)
    own = engine_plan("k4v4+host", settings, tmp_path)["arguments"]
    assert own["kv_cache_memory_bytes"] == engine_plan("bf16", settings, tmp_path)["arguments"]["kv_cache_memory_bytes"]
    tokens = held_tokens(64, 8192, 4, 96)
    assert own["kv_cache_memory_bytes"] == pytest.approx(0.2 * tokens * 32 * 2 * 8 * 128 * 2, rel=0.01)
    assert own["kv_offloading_size"] == 40.0
    assert own["attention_backend"] == "CUSTOM"
    for wrong, message in (
        ({"systems": ("k4v4+disk",)}, r"known are \+host and \+cold"),
        ({"engine": "sglang", "phases": ("sessions",)}, "are vLLM's"),
        ({"phases": ("sessions",), "turns": 200}, "leave no room"),
    ):
        with pytest.raises(InputError, match=message):
            ServeSettings(**wrong)


def test_a_cache_of_a_given_size(tmp_path):
    def own(**given):
        return engine_plan("bf16", ServeSettings(**given), tmp_path)["arguments"]

    assert own(cache_gib=1.5)["kv_cache_memory_bytes"] == 3 << 29
    assert "kv_cache_memory_bytes" not in own()
    for wrong in ({"engine": "sglang"}, {"phases": ("sessions",)}):
        with pytest.raises(InputError, match="--cache-gib is for vLLM, and not for the phase sessions"):
            ServeSettings(cache_gib=1, **wrong)


def test_the_offload_phase_has_one_tier(tmp_path):
    settings = ServeSettings(phases=("offload",), offload_gib=2)
    plans = {x: engine_plan(x, settings, tmp_path)["arguments"] for x in ("bf16", "bf16+cold", "k4v4@LBHNC")}
    assert [plan.get("kv_offloading_size") for plan in plans.values()] == [2, None, 2]
    assert plans["bf16+cold"]["kv_transfer_config"]["kv_connector_extra_config"]["cpu_bytes_to_use"] == 2 << 30


def test_a_chart_of_sessions(tmp_path):
    names = "hit_share", "time_to_first_token_p50", "time_to_first_token_p99", "output_tokens_per_second"
    systems = {name: {"sessions": dict.fromkeys(names, value)} for name, value in (("bf16", 0.25), ("k4v4", 0.5))}
    report = serve.ServeReport(ServeSettings(), systems, over_stock(systems), "d", {}, "", "")
    serve.plot_sessions(report, tmp_path / "sessions.svg")
    root = ElementTree.parse(tmp_path / "sessions.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == 4
    assert report.over_bf16["k4v4"]["sessions_time_to_first_token_p50"] == 2.0
    with pytest.raises(InputError, match="needs a system"):
        serve.plot_sessions(serve.ServeReport(ServeSettings(), {}, {}, "d", {}, "", ""), tmp_path / "none.svg")


def test_percentiles():
    assert [percentile(list(range(1, 101)), p) for p in (50, 99)] == [50, 99]
    assert percentile([3.0], 99) == 3.0


def test_a_system_that_fails_leaves_the_others_their_numbers(tmp_path, monkeypatch):
    """A script replaces the engines: one fails half-way, one finishes."""
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import json, sys\n"
        "plan = json.load(open(sys.argv[1]))\n"
        "json.dump({'kv_tokens': 7}, open(sys.argv[2], 'w'))\n"
        "print(plan['system'] + ': half way', file=sys.stderr)\n"
        "sys.exit('out of memory' if plan['system'] == 'fp8' else 0)\n"
    )
    popen = subprocess.Popen

    def start(command, **how):
        return popen([sys.executable, str(fake), *command[-2:]], **how)

    monkeypatch.setattr(subprocess, "Popen", start)
    lines = []
    settings = ServeSettings(systems=("fp8", "k4v4"))
    report = bench_serve(settings, lines.append, tmp_path / "kept")
    assert report.systems["fp8"]["kv_tokens"] == report.systems["k4v4"]["kv_tokens"] == 7
    assert "out of memory" in report.systems["fp8"]["error"]
    assert "error" not in report.systems["k4v4"]
    assert "k4v4: half way" in lines
    assert report.command
    assert {p.name for p in (tmp_path / "kept").iterdir()} >= {"fp8.log", "k4v4.json", "k4v4.plan.json"}


def run_small(shape: str, *more: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "slimkv", "bench", "serve", "--shape", shape, "--eager", "--json", *more],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def small_run(*more: str, **environment: str) -> dict:
    sizes = {"context": 512, "requests": 3, "new-tokens": 4, "most-requests": 4, "arrivals": 3, "rate": 20}
    small = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    report = run_small("tiny", *small, *more, **environment)
    for system in report["systems"].values():
        assert system["decode"]["requests"] == 3
        assert system["decode"]["decode_tokens_per_second"] > 0
        assert system["decode"]["prefix_hit_share"] > 0.7
        assert system["full"]["requests"] == 4
        assert system["full"]["preemptions"] == 0
        assert 0 < system["poisson"]["time_to_first_token_p50"] <= system["poisson"]["time_to_first_token_p99"]
    return report


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_a_small_run():
    report = small_run("--systems", "bf16,k4v4", "--cache-gib", "0.5")
    stock, slim = (report["systems"][name]["kv_tokens"] for name in ("bf16", "k4v4"))
    assert stock == pytest.approx(0.5 * 2**30 / (2 * 2 * 2 * 64 * 2), rel=0.01)  # layers, K and V, heads, values, bytes
    assert slim / stock == pytest.approx(3.76, rel=0.01)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_sessions_find_more_in_a_packed_cache():
    """With the same bytes of cache. vLLM's own metrics count the tokens."""
    words = ["--phases", "sessions", "--systems", "fp32,k4v4", "--dtype", "float32", "--users", "8", "--turns", "3"]
    report = run_small("tiny", *words, "--context", "768", "--new-tokens", "8", "--think", "0.2", "--held", "0.3")
    stock, slim = (report["systems"][name]["sessions"] for name in ("fp32", "k4v4"))
    for found in (stock, slim):
        assert found["requests"] == 24
        assert found["prompt_tokens"] == stock["prompt_tokens"]
        assert 0 <= found["hit_share"] < 1
        assert found["recomputed_tokens"] >= 0
        assert 0 < found["time_to_first_token_p50"] <= found["time_to_first_token_p99"]
    assert slim["hit_share"] > stock["hit_share"] + 0.1
    assert slim["recomputed_tokens"] < stock["recomputed_tokens"]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")
def test_a_small_run_in_sglang():
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    report = small_run("--engine", "sglang", "--systems", "k4v4", "--memory", "0.2", **on_cpu)
    assert report["systems"]["k4v4"]["block_size"] == 64


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("sent", sample([signal.SIGTERM, signal.SIGINT], 2))
def test_an_engine_ends_with_who_started_it(sent, tmp_path):
    """The engine is a shell script that writes down the id of a process it started and waits for it."""
    engine, started = tmp_path / "engine", tmp_path / "started"
    engine.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {started}\nwait\n")
    engine.chmod(0o755)
    program = (
        "import signal, sys; from pathlib import Path; from slimkv.lab.bench import serve;"
        "sys.executable = sys.argv[1];"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # background jobs of a shell ignore SIGINT
        "settings = serve.ServeSettings(systems=('bf16',), shape='tiny');"
        "serve._run_system({'system': 'bf16', 'environment': {}}, settings, Path(sys.argv[2]), print)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(engine), str(tmp_path)], stderr=subprocess.DEVNULL
    ) as own:
        deadline = time.monotonic() + 120
        while not (started.is_file() and started.read_text().endswith("\n")) and time.monotonic() < deadline:
            time.sleep(0.05)
        own.send_signal(sent)
        assert own.wait(30) != 0
    child = int(started.read_text())
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
