"""The OpenAPI document: valid, complete, and true of what is sent."""

from __future__ import annotations

from typing import Any

import jsonschema
import msgspec
import pytest
from door import MODEL, DoorOn, door_on, joined
from openapi_spec_validator import validate

from offbook.actors.request import CompletionRequest
from offbook.server.app import Door, create_app
from offbook.server.openapi import document


def validator(name: str) -> Any:
    whole = msgspec.json.decode(msgspec.json.encode(document()))
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": whole["components"]})


def test_the_document_is_valid() -> None:
    validate(document())


def test_every_route_is_documented() -> None:
    documented = {(path, method) for path, item in document()["paths"].items() for method in item}
    rules = create_app(Door()).url_map.iter_rules()
    served = {
        (rule.rule.replace("<path:name>", "{model}"), method.lower())
        for rule in rules
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert documented == served


def test_every_field_of_a_request_is_documented() -> None:
    schema = document()["components"]["schemas"]["CompletionRequest"]
    assert set(schema["properties"]) == set(CompletionRequest.__struct_fields__)
    assert (schema["required"], schema["additionalProperties"]) == (["model", "prompt"], False)


EVERYTHING = {
    "logprobs": True, "top_logprobs": 2, "echo": True, "raw_output": True, "return_token_ids": True, "n": 2,
    "perf_metrics_in_response": True, "sampling_mask": "non_zero_list", "max_tokens": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2}, EVERYTHING, {**EVERYTHING, "sampling_mask": "non_zero_buffer"}]
)
async def test_what_is_sent_is_what_is_documented(fields: dict[str, Any]) -> None:
    async with door_on() as door:
        validator("CompletionResponse").validate((await door.completion(**fields)).json)
        stream = await door.completion(**fields, stream=True)
        for chunk in stream.events:
            validator("CompletionChunk").validate(chunk)
        validator("CompletionResponse").validate(joined(stream.events))
        await _others(door)


async def _others(door: DoorOn) -> None:
    validator("Health").validate((await door.get("/health")).json)
    validator("ModelList").validate((await door.get("/v1/models")).json)
    validator("Model").validate((await door.get(f"/v1/models/{MODEL}")).json)
    for answer in (
        await door.completion(temperature=9),
        await door.get("/x"),
        await door.complete(model="x", prompt="y"),
    ):
        validator("ErrorResponse").validate(answer.json)
    served = (await door.get("/openapi.json")).json
    assert served == msgspec.json.decode(msgspec.json.encode(document()))
