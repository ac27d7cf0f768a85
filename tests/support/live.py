"""Asking a running server the way tests need it: plain and streamed at once, alone, and many at the same time.

Rules of this file: everything goes over real sockets; ids and bytes come from the server's own answers, so that a test
holds on any model; every ``both`` is also a test that a stream adds up to the plain answer.
"""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import httpx2 as httpx
from door import joined
from raw_http import Answered
from server_process import ServerProcess, server_process

PATH = "/v1/completions"
Body = dict[str, Any]


class Live:
    """One server. ``vocabulary``: how many ids it has; ``eos``: an id and its written form."""

    def __init__(self, url: str, *, vocabulary: int, eos: tuple[int, str]) -> None:
        self.url = url
        self.vocabulary = vocabulary
        self.eos_id, self.eos_text = eos
        self.client = httpx.Client(base_url=url, timeout=60.0)
        card = self.client.get("/v1/models").json()["data"][0]
        self.model: str = card["id"]
        self.context: int = card["context_length"]
        self.id_of = cache(self._id_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def post(self, body: Body, headers: dict[str, str] | None = None) -> Answered:
        """A body as it is, lone surrogates and all."""
        named = {"content-type": "application/json", **(headers or {})}
        answer = self.client.post(PATH, content=json.dumps(body).encode(), headers=named)
        return Answered(answer.status_code, dict(answer.headers), answer.content)

    def ask(self, prompt: Any = "x", headers: dict[str, str] | None = None, **fields: Any) -> Answered:
        return self.post({"model": self.model, "prompt": prompt, **fields}, headers)

    def plain(self, prompt: Any = "x", **fields: Any) -> Body:
        """The body of a good answer."""
        answer = self.ask(prompt, **fields)
        assert answer.status == 200, (answer.status, answer.body[:500])
        body: Body = answer.json
        return body

    def both(self, prompt: Any = "x", **fields: Any) -> Body:
        """The plain body, after the same request as a stream has added up to it."""
        if "seed" not in fields and fields.get("temperature") != 0:
            fields["seed"] = 20
        body = self.plain(prompt, **fields)
        stream = self.ask(prompt, **fields, stream=True)
        assert stream.status == 200, (stream.status, stream.body[:500])
        assert said(joined(stream.events)) == said(body), fields
        return body

    def choice(self, prompt: Any = "x", **fields: Any) -> Body:
        """The only choice of an answer, plain and streamed."""
        (choice,) = self.both(prompt, **fields)["choices"]
        found: Body = choice
        return found

    def text(self, prompt: Any = "x", **fields: Any) -> str:
        text: str = self.choice(prompt, **fields)["text"]
        return text

    def lone(self, prompt: Any = "x", **fields: Any) -> Body:
        """The plain answer of a cold cache; nobody else is asking."""
        fields |= {"stream": False, "prompt_cache_isolation_key": uuid.uuid4().hex}
        body = self.plain(prompt, **fields)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        return body

    def together(self, bodies: Iterable[Body]) -> list[Answered]:
        """All at the same time; each body is ``ask``'s keyword arguments."""
        listed = list(bodies)
        with ThreadPoolExecutor(len(listed)) as threads:
            return list(threads.map(lambda fields: self.ask(**fields), listed))

    def company_changes_nothing(self, *bodies: Body) -> list[Body]:
        """Each gives at the same time as the others what it gives alone with a cold cache; the lone answers."""
        alone = [self.lone(**body) for body in bodies]
        for answer, lone, body in zip(self.together(bodies), alone, bodies, strict=True):
            assert answer.status == 200, answer.body[:500]
            whole = joined(answer.events) if body.get("stream") else answer.json
            assert whole["choices"] == lone["choices"], body
        return alone

    def refused(self, prompt: Any = "x", **fields: Any) -> str:
        """The message of a well-formed 4xx, the same plain and streamed."""
        answers = [self.ask(prompt, **fields), self.ask(prompt, **fields, stream=True)]
        for answer in answers:
            assert 400 <= answer.status < 500, (answer.status, answer.body[:300])
        message: str = answers[0].json["error"]["message"]
        assert message == answers[1].json["error"]["message"]
        return message

    def canary(self) -> str:
        """A tiny good request that must go on giving the same text whatever else has happened."""
        text: str = self.plain("ok", max_tokens=3, temperature=0, ignore_eos=True)["choices"][0]["text"]
        return text

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.plain(text, max_tokens=0, return_token_ids=True)["choices"][0]["prompt_token_ids"]
        return found

    def _id_of(self, text: str) -> int:
        """The id of the token that is written so."""
        ids = self.ids(text)
        assert len(ids) == 1, (text, ids)
        return ids[0]

    def only(self, *texts: str, bias: float = 100) -> dict[str, float]:
        """``logit_bias`` that makes these tokens the likeliest."""
        return {str(self.id_of(text)): bias for text in texts}

    def long_ids(self, length: int, seed: int = 0) -> list[int]:
        """Valid ids in a fixed order that depends on ``seed``; none of them special."""
        return [3 + (i * 7 + i * i * 3 + seed * 31) % (min(self.vocabulary, 290) - 3) for i in range(length)]


def said(body: Body) -> Body:
    """What two answers to one request must have in common."""
    usage = {k: v for k, v in body["usage"].items() if k != "prompt_tokens_details"}
    return {"choices": body["choices"], "usage": usage, "model": body["model"], "object": body["object"]}


def grammar(text: str) -> Body:
    """``response_format`` that leaves one text possible, whatever the model."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        text = text.replace(plain, escaped)
    return {"type": "grammar", "grammar": f'root ::= "{text}"'}


def schema(value: Any) -> Body:
    """``response_format`` with a JSON schema in OpenAI's wrapper."""
    return {"type": "json_schema", "json_schema": {"name": "t", "schema": value}}


@contextmanager
def ended_well(*arguments: str) -> Iterator[ServerProcess]:
    """A server that, after all its tests, has nothing bad to say and ends as it should."""
    with server_process(*arguments) as server:
        yield server
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        said = "".join(server.errors)
        assert "Traceback" not in said and " ERROR " not in said, said[-2000:]
