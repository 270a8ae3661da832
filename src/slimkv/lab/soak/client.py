"""Client requests: complete, streamed, or cancelled midway, with the standard library's HTTP."""

from __future__ import annotations

import http.client
import json
import math
import time
from dataclasses import dataclass
from typing import Any

FINISHED = ("stop", "length")


@dataclass(frozen=True)
class Ask:
    """One request for a completion.

    ``hang_up``: the client closes the connection after this many pieces of a stream (0: right after sending), or after
    this many tenths of a second without streaming; None: it waits for the end.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool = False
    hang_up: int | None = None
    temperature: float = 0.0
    logprobs: bool = False
    ignore_eos: bool = False
    seed: int = 0

    def body(self) -> dict[str, Any]:
        """The body of the POST to ``/v1/completions``."""
        out: dict[str, Any] = {
            "model": "soak", "prompt": list(self.prompt), "max_tokens": self.max_tokens, "stream": self.stream,
            "temperature": self.temperature, "seed": self.seed, "ignore_eos": self.ignore_eos,
        }  # fmt: skip
        if self.stream:
            out["stream_options"] = {"include_usage": True}
        if self.logprobs:
            out["logprobs"] = 1
        return out


@dataclass(frozen=True)
class Reply:
    """The outcome of a request. ``failure`` is None for a finished and for a cancelled answer."""

    failure: str | None = None
    cancelled: bool = False
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0


class BadReplyError(Exception):
    """An answer that violates the protocol or has invalid contents."""


class Client:
    """Sends requests to one server."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.host, self.port, self.timeout = host, port, timeout

    def call(self, method: str, path: str, body: object = None, timeout: float | None = None) -> tuple[int, bytes]:
        """Sends one request; returns the status and the body of the answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout or self.timeout)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: object = None) -> Any:
        """The JSON answer of a control endpoint; raises ``BadReplyError`` for any status but 200."""
        status, content = self.call(method, path, body)
        if status != 200:
            raise BadReplyError(f"{method} {path}: status {status}: {content[:300]!r}")
        return json.loads(content) if content else None

    def healthy(self) -> bool:
        """Whether the server reports that it is healthy."""
        try:
            return self.call("GET", "/health", timeout=2)[0] == 200
        except OSError:
            return False

    def metrics(self) -> str:
        """The text of ``/metrics``."""
        return self.call("GET", "/metrics", timeout=60)[1].decode()

    def tokenize(self, text: str) -> list[int]:
        """The model's tokens of ``text``."""
        return list(self.json("POST", "/tokenize", {"model": "soak", "prompt": text})["tokens"])

    def complete(self, ask: Ask) -> Reply:
        """Sends ``ask``; never raises: failures are in the reply."""
        begin = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request("POST", "/v1/completions", json.dumps(ask.body()), {"Content-Type": "application/json"})
            if ask.hang_up is not None and (not ask.stream or ask.hang_up == 0):
                time.sleep(ask.hang_up / 10)
                return Reply(cancelled=True, seconds=time.monotonic() - begin)
            answer = connection.getresponse()
            if answer.status != 200:
                return Reply(f"status {answer.status}: {answer.read()[:500]!r}", seconds=time.monotonic() - begin)
            if ask.stream:
                reply = _streamed(answer, ask)
            else:
                whole = json.loads(answer.read())
                choice = whole["choices"][0]
                _check_numbers(choice)
                reply = _finished(choice["finish_reason"], choice["text"], whole["usage"], ask)
            return Reply(**reply, seconds=time.monotonic() - begin)
        except (OSError, http.client.HTTPException, BadReplyError, KeyError, IndexError, ValueError) as error:
            return Reply(f"{type(error).__name__}: {error}", seconds=time.monotonic() - begin)
        finally:
            connection.close()


def _streamed(answer: http.client.HTTPResponse, ask: Ask) -> dict[str, Any]:
    text, reason, usage, pieces = "", None, None, 0
    while line := answer.readline():
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            if usage is None:
                raise BadReplyError("the stream ended without its usage")
            return _finished(reason, text, usage, ask)
        piece = json.loads(data)
        if "error" in piece:
            raise BadReplyError(f"an error in the stream: {piece['error']}")
        usage = piece.get("usage") or usage
        for choice in piece.get("choices", ()):
            _check_numbers(choice)
            text += choice["text"]
            reason = choice.get("finish_reason") or reason
        pieces += 1
        if ask.hang_up is not None and pieces >= ask.hang_up:
            return {"cancelled": True}
    raise BadReplyError(f"the stream broke off after {pieces} pieces")


def _finished(reason: str | None, text: str, usage: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """The fields of a reply, checked against the request."""
    tokens = usage["completion_tokens"]
    if reason not in FINISHED:
        raise BadReplyError(f"finish_reason is {reason!r}, not one of {', '.join(FINISHED)}")
    if usage["prompt_tokens"] != len(ask.prompt):
        raise BadReplyError(f"{usage['prompt_tokens']} prompt tokens were counted, {len(ask.prompt)} were sent")
    if not 0 < tokens <= ask.max_tokens or ((reason == "length" or ask.ignore_eos) and tokens != ask.max_tokens):
        raise BadReplyError(f"{tokens} tokens with finish_reason {reason!r}, of {ask.max_tokens} asked for")
    return {"text": text, "prompt_tokens": len(ask.prompt), "tokens": tokens}


def _check_numbers(choice: dict[str, Any]) -> None:
    """Raises unless log-probabilities are finite and not positive. JSON has no NaN, but Python's reader accepts one."""
    given = choice.get("logprobs") or {}
    for number in given.get("token_logprobs") or ():
        if number is None or not math.isfinite(number) or number > 1e-4:
            raise BadReplyError(f"a log-probability of {number}")
