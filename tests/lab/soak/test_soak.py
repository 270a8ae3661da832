"""The checks of a soak test, on fake servers: every violation is detected, and a healthy run passes."""

from __future__ import annotations

import http.server
import json
import math
import threading
from dataclasses import replace

import pytest

from slimkv.errors import InputError, SpecError
from slimkv.lab.soak import checks, metrics, server
from slimkv.lab.soak.checks import Answers, Sample
from slimkv.lab.soak.client import Ask, Client
from slimkv.lab.soak.load import Counts, Load, random_asks
from slimkv.lab.soak.settings import SoakSettings

SETTINGS = SoakSettings("model")
TEXT = list(range(5000))
METRICS = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="soak"} 0.0
vllm:num_requests_waiting{engine="0",model_name="soak"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="soak"} 0.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="soak"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="soak"} 26.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="soak"} 9.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="soak"} 0.0
vllm:num_preemptions_total{engine="0",model_name="soak"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="soak"} 900.0
vllm:generation_tokens_total{engine="0",model_name="soak"} 500.0
vllm:prefix_cache_queries_total{engine="0",model_name="soak"} 900.0
vllm:prefix_cache_hits_total{engine="0",model_name="soak"} 64.0
vllm:corrupted_requests_total{engine="0",model_name="soak"} 0.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="soak"} 1.7e+09
"""
COUNTS = Counts(finished=20, cancelled=9, tokens=300, shared_prefix=25)
AT_REST = metrics.parse_metrics(METRICS)


def samples(growth_mib: float, count: int = 60) -> list[Sample]:
    """One sample per second. Memory fluctuates and grows by ``growth_mib`` in total."""
    out = []
    for i in range(count):
        memory = 1000 + growth_mib * i / count + (5 if i % 7 == 0 else 0)
        out.append(Sample(float(i), int(memory * 2**20), {k: v * i / count for k, v in AT_REST.items()}))
    return out


def test_metrics_are_read():
    assert AT_REST["stopped"] == 4
    assert AT_REST["length"] == 26
    assert set(AT_REST) == {*metrics.GAUGES, *metrics.COUNTERS}
    two = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    assert metrics.parse_metrics(two)["length"] == 52, "engines are added up"


def test_a_healthy_run_passes():
    same = Answers(["a", "b"], ["a", "b"], ["a", "b"], ["a", "b"])
    found = [
        checks.check_requests(COUNTS), *checks.check_answers(same), checks.check_blocks(AT_REST, True),
        checks.check_memory(checks.memory_of(samples(3)), samples(3), SETTINGS),
        checks.check_metrics(samples(3), AT_REST, COUNTS, 10), checks.check_load(AT_REST, COUNTS, SETTINGS, 10),
    ]  # fmt: skip
    assert [c.name for c in found if not c.passed] == []


def test_a_leak_is_seen():
    memory = checks.memory_of(samples(90))
    assert memory.growth_mib == pytest.approx(60, rel=0.05), "after the first third"
    assert not checks.check_memory(memory, samples(90), SETTINGS).passed
    assert not checks.check_memory(checks.memory_of(samples(0, 5)), samples(0, 5), SETTINGS).passed, "too few samples"


def test_violations_are_seen():
    assert not checks.check_requests(replace_counts(failed=1)).passed
    assert not checks.check_requests(Counts()).passed, "nothing was served"
    assert not checks.check_answers(Answers(["a"], ["a"], ["b"], ["b"]))[1].passed
    assert not checks.check_answers(Answers(["a"], ["c"], ["a"], ["a"]))[0].passed
    assert not checks.check_blocks({**AT_REST, "kv_usage": 0.01}, True).passed
    assert not checks.check_blocks(AT_REST, False).passed
    assert not checks.check_load({**AT_REST, "preemptions": 0}, COUNTS, SETTINGS, 10).passed
    assert not checks.check_load({**AT_REST, "prefix_hits": 0}, COUNTS, SETTINGS, 10).passed
    many = replace_counts(cancelled=50)
    assert checks.check_load({**AT_REST, "length": 40.0}, many, SETTINGS, 10).passed
    late = checks.check_load({**AT_REST, "length": 70.0}, many, SETTINGS, 10)
    assert "finished all but 6" in late.detail, "their clients hung up, and it went on"
    assert not late.passed


def replace_counts(**changes) -> Counts:
    return replace(COUNTS, **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"running": 1.0}, {"errors": 2.0}, {"corrupted": 1.0}, {"kv_usage": math.nan}, {"generation_tokens": 10.0},
        {"length": 2.0}, {"length": 400.0}, {"kv_usage": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_metrics_that_make_no_sense(change):
    assert not checks.check_metrics(samples(0), {**AT_REST, **change}, COUNTS, 10).passed


def test_a_counter_that_falls_and_one_that_is_missing():
    falls = [*samples(0), Sample(61.0, 1, {**AT_REST, "preemptions": 99.0})]
    assert "fell" in checks.check_metrics(falls, AT_REST, COUNTS, 10).detail
    without = {k: v for k, v in AT_REST.items() if k != "corrupted"}
    assert "no corrupted" in checks.check_metrics([], without, COUNTS, 10).detail


def test_the_load_is_random_and_the_same_for_a_seed():
    def first(seed: int, count: int = 400) -> list:
        source = random_asks(replace(SETTINGS, seed=seed), TEXT)
        return [next(source) for _ in range(count)]

    asks = first(0)
    assert asks == first(0)
    assert asks != first(1)
    burst, later = asks[: SETTINGS.concurrency], asks[SETTINGS.concurrency :]
    assert sum(len(a.prompt) for _, a, _ in burst) > SETTINGS.cache_tokens, "more than the cache holds"
    assert all(len(a.prompt) + a.max_tokens <= SETTINGS.max_model_len for _, a, _ in asks)
    share = sum(a.hang_up is not None for _, a, _ in later) / len(later)
    assert share == pytest.approx(SETTINGS.cancelled, abs=0.08)
    assert {a.stream for _, a, _ in later} == {True, False}
    assert sum(shared for *_, shared in later) > 100


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers like vLLM, or with the fault named by ``server.fault``."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault, tokens = self.server.fault, asked["max_tokens"]
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}
        if fault == "status":
            return self.reply(500, b"{}")
        if fault == "short":
            usage["completion_tokens"] = tokens - 1
        reason = None if fault == "reason" else "length"
        choice = {"text": "x" * tokens, "finish_reason": reason}
        if asked.get("logprobs"):
            choice["logprobs"] = {"token_logprobs": [math.nan if fault == "nan" else -0.5] * tokens}
        if not asked["stream"]:
            return self.reply(200, json.dumps({"choices": [choice], "usage": usage}).encode())
        lines = [{"choices": [{**choice, "text": "x", "finish_reason": None}]} for _ in range(tokens)]
        lines.append({"choices": [{**choice, "text": ""}]})
        lines.append({"choices": [], "usage": usage})
        if fault == "error":
            lines[1:] = [{"error": {"message": "engine died"}}]
        text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
        if fault != "cut":
            text += "data: [DONE]\n\n"
        return self.reply(200, text.encode())

    def reply(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def fake():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.fault = None
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer(fake, stream):
    client = Client(*fake.server_address, 10)
    reply = client.complete(Ask((1, 2, 3), 5, stream, logprobs=True))
    assert (reply.failure, reply.text, reply.tokens, reply.prompt_tokens) == (None, "xxxxx", 5, 3)
    assert client.complete(Ask((1,), 5, stream, hang_up=2)).cancelled


@pytest.mark.parametrize(
    ("fault", "stream", "said"),
    [
        ("status", False, "status 500"), ("short", False, "4 tokens"), ("reason", False, "finish_reason is None"),
        ("nan", False, "log-probability of nan"), ("nan", True, "log-probability"), ("cut", True, "broke off"),
        ("error", True, "engine died"), ("short", True, "4 tokens"),
    ],
)  # fmt: skip
def test_failures_are_told(fake, fault, stream, said):
    fake.fault = fault
    reply = Client(*fake.server_address, 10).complete(Ask((1, 2), 5, stream, logprobs=True))
    assert reply.failure is not None
    assert said in reply.failure


def test_nobody_listens():
    assert "refused" in Client("127.0.0.1", server.free_port(), 2).complete(Ask((1,), 1)).failure


def test_a_load_ends_by_number_and_counts(fake):
    settings = replace(SETTINGS, requests=60, rate=1000.0)
    load, pauses = Load(settings, Client(*fake.server_address, 10), TEXT), []
    load.run([0.0], lambda: pauses.append(load.counts.served), lambda: None)
    assert load.counts.served == 60
    assert load.counts.failed == 0
    assert len(pauses) == 1
    assert load.counts.cancelled > 5
    fake.fault = "status"
    load = Load(settings, Client(*fake.server_address, 10), TEXT)
    load.run([], lambda: None, lambda: None)
    assert load.counts.failed > 20
    assert "status 500" in load.counts.failures[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": 0}, "seconds must be a positive number"), ({"seconds": math.inf}, "seconds"),
        ({"requests": 0}, "requests"), ({"cancelled": 1.0}, "cancelled"),
        ({"cache_tokens": 100}, "does not hold one request"), ({"format": "int4"}, "unknown format"),
        ({"concurrency": True}, "concurrency"), ({"max_model_len": 16}, "--max-model-len"), ({"sleeps": -1}, "sleeps"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense(change, said):
    with pytest.raises((InputError, SpecError), match=said):
        replace(SETTINGS, **change)


def test_the_server_listens_on_the_loopback_interface_alone():
    words = server.command(SETTINGS, "model", 1234, can_sleep=True)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "--enable-sleep-mode" in words
    assert words[words.index("--num-gpu-blocks-override") + 1] == "64"
    assert "--attention-backend" not in server.command(replace(SETTINGS, format="stock"), "model", 1, False)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.vllm
def test_a_real_server(tmp_path):
    pytest.importorskip("vllm")
    from slimkv.lab import models
    from slimkv.lab.soak.run import soak_server

    settings = SoakSettings(
        models.DEFAULT, seconds=60, concurrency=6, max_model_len=192, cache_tokens=384, answers=4, request_seconds=600
    )
    report = soak_server(settings, print, tmp_path)
    assert report.passed, [c for c in report.checks if not c.passed]
