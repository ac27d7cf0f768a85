"""What one field of a request says about another, and the forms of a prompt: the rules that types cannot state.

Rules of this file: pure; every rule works on a body that may be wrong elsewhere, so that all failures come at once;
nothing here needs a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from .errors import Failure
from .field_errors import FAILURES_MAX, extra, missing, show

PROMPT_FORMS = "a string, a list of strings, a list of token ids or a list of lists of token ids"
SCHEMA_DEPTH_MAX = 64  # nesting of a JSON schema: what walks it later may recurse
_ID_MAX = 2**31 - 1
_COMPANIONS = {
    "json_schema": ("json_schema", "schema"),
    "json_object": ("schema",),
    "grammar": ("grammar",),
    "text": (),
}  # what goes with each type of response_format


def storage_routing(fields: Mapping[str, object]) -> Failure | None:
    """The field with which a trainer asks for routing matrices in a storage that no self-hosted server shares. It must
    be reported alone: the trainer compares the whole message, and falls back to matrices in the answer."""
    return extra("routing_matrix_format") if fields.get("routing_matrix_format") is not None else None


def storage_mask(fields: Mapping[str, object]) -> list[Failure]:
    """The same for sampling masks: to a server without that storage it is the field that does not exist."""
    return [extra("sampling_mask")] if fields.get("sampling_mask") == "parquet_v1" else []


def prompt_failures(prompt: object) -> list[Failure]:
    """What is wrong with a prompt; the first item decides which of the four forms it is to be."""
    return list(islice(_prompt(prompt), FAILURES_MAX))


def _prompt(prompt: object) -> Iterator[Failure]:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list | tuple):
        yield Failure(("prompt",), f"Input should be {PROMPT_FORMS}", "prompt_type", show(prompt))
    elif not prompt:
        yield Failure(("prompt",), "List should have at least 1 item after validation, not 0", "too_short")
    elif isinstance(prompt[0], str):
        if set(map(type, prompt)) != {str}:
            wrong = ((i, item) for i, item in enumerate(prompt) if not isinstance(item, str))
            message = "Input should be a valid string, as the first prompt is"
            for i, item in wrong:
                yield Failure(("prompt", i), message, "string_type", show(item))
    elif isinstance(prompt[0], list | tuple):
        for i, item in enumerate(prompt):
            if not isinstance(item, list | tuple):
                message = "Input should be a valid list of token ids, as the first prompt is"
                yield Failure(("prompt", i), message, "list_type", show(item))
            elif not item:
                message = "List should have at least 1 item after validation, not 0"
                yield Failure(("prompt", i), message, "too_short")
            else:
                yield from _ids(item, ("prompt", i))
    elif isinstance(prompt[0], int) and not isinstance(prompt[0], bool):
        yield from _ids(prompt, ("prompt",))
    else:
        yield Failure(("prompt", 0), f"Input should be {PROMPT_FORMS}", "prompt_type", show(prompt[0]))


def _ids(ids: list[object] | tuple[object, ...], loc: tuple[str | int, ...]) -> Iterator[Failure]:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _ID_MAX:  # type: ignore[type-var,operator]
        return
    for i, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, int):
            yield Failure((*loc, i), "Input should be a valid integer", "int_type", show(item))
        elif item < 0:
            yield Failure((*loc, i), "Input should be greater than or equal to 0", "greater_than_equal", show(item))
        elif item > _ID_MAX:
            yield Failure((*loc, i), f"Input should be less than or equal to {_ID_MAX}", "less_than_equal", show(item))


def rule_failures(fields: Mapping[str, object]) -> list[Failure]:
    """Failures of fields against one another."""
    failures: list[Failure] = []
    for one, other in (("max_tokens", "max_completion_tokens"), ("speculation", "prediction")):
        if fields.get(one) is not None and fields.get(other) is not None:
            failures.append(Failure((other,), f"Cannot be given together with '{one}'", "value_error"))
    if isinstance(options := fields.get("response_format"), Mapping):
        failures += _response_format(options)
    if isinstance(thinking := fields.get("thinking"), Mapping) and thinking.get("type") in ("disabled", "adaptive"):
        keys = ("budget_tokens", "keep", "budget_end_str", "effort")
        failures += [extra("thinking", key) for key in keys if thinking.get(key) is not None]
    return failures


def _response_format(options: Mapping[str, object]) -> Iterator[Failure]:
    kind = options.get("type")
    if not isinstance(kind, str) or kind not in _COMPANIONS:
        return  # the schema has said so
    wanted = _COMPANIONS[kind]
    given = [key for key in ("json_schema", "schema", "grammar") if options.get(key) is not None]
    for key in given:
        if key not in wanted:
            message = f"Has no meaning with type '{kind}'"
            yield Failure(("response_format", key), message, "value_error")
    chosen = [key for key in given if key in wanted]
    if len(chosen) > 1:
        yield Failure(("response_format", chosen[1]), f"Cannot be given together with '{chosen[0]}'", "value_error")
    if not chosen and kind in ("json_schema", "grammar"):
        yield missing("response_format", kind)
    for key in chosen:
        if _deeper_than(options[key], SCHEMA_DEPTH_MAX):
            message = f"Nesting should be at most {SCHEMA_DEPTH_MAX} levels deep"
            yield Failure(("response_format", key), message, "recursion_loop")


def _deeper_than(value: object, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            child
            for item in layer
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return False
    return any(isinstance(item, dict | list) for item in layer)
