"""Every failure of a body against its schema, worded as the service's clients know it.

Why: the decoder stops at the first failure and words it its own way. This slow path runs only after the decoder has
refused a body, walks the same types, and reports all failures. Rules of this file: pure; bounded in time and output
whatever the body holds (``FAILURES_MAX``, shortened values).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice

import msgspec
from msgspec import inspect

from .errors import Failure

FAILURES_MAX = 16  # reported per field; a body can hold millions
EXTRA = "extra_forbidden"
Loc = tuple[str | int, ...]

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 40
_short.maxlevel = 2
_short.maxlist = _short.maxdict = _short.maxtuple = 4


def show(value: object) -> str:
    """A short ``repr``, whatever the value's size and depth; surrogates that no reply could carry are escaped."""
    return _short.repr(value).encode("utf-8", "backslashreplace").decode()


def missing(*loc: str | int) -> Failure:
    return Failure(loc, "Field required", "missing")


def extra(*loc: str | int) -> Failure:
    return Failure(loc, "Extra inputs are not permitted", EXTRA)


def struct_failures(kind: type[msgspec.Struct], fields: Mapping[str, object], *, skip: frozenset[str]) -> list[Failure]:
    """What is wrong with ``fields`` as a ``kind``, in the order of the schema, unknown fields last."""
    info = _type_info(kind)
    assert isinstance(info, inspect.StructType)
    return list(_struct(info, fields, (), skip))


@cache
def _type_info(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _struct(info: inspect.StructType, value: object, loc: Loc, skip: frozenset[str] = frozenset()) -> Iterator[Failure]:
    if not isinstance(value, Mapping):
        yield Failure(loc, "Input should be an object", "model_type", show(value))
        return
    known = {field.encode_name for field in info.fields}
    for field in info.fields:
        name = field.encode_name
        if name in skip:
            continue
        if name in value:
            yield from islice(_check(field.type, value[name], (*loc, name)), FAILURES_MAX)
        elif field.required:
            yield missing(*loc, name)
    if info.forbid_unknown_fields:
        unknown = (extra(*loc, str(name)[:100]) for name in value if name not in known)
        yield from islice(unknown, FAILURES_MAX)


def _check(info: inspect.Type, value: object, loc: Loc) -> Iterator[Failure]:
    """Failures of one value against one type."""
    match info:
        case inspect.UnionType():
            yield from _union(info, value, loc)
        case inspect.IntType() | inspect.FloatType():
            yield from _number(info, value, loc)
        case inspect.StrType():
            if not isinstance(value, str):
                yield Failure(loc, "Input should be a valid string", "string_type", show(value))
            elif info.min_length and len(value) < info.min_length:
                yield Failure(loc, f"String should have at least {_many(info.min_length, 'character')}",
                              "string_too_short", show(value))  # fmt: skip
        case inspect.BoolType():
            if not isinstance(value, bool):
                yield Failure(loc, "Input should be a valid boolean", "bool_type", show(value))
        case inspect.LiteralType():
            if not isinstance(value, str) or value not in info.values:
                yield Failure(loc, f"Input should be {_either(info.values)}", "literal_error", show(value))
        case inspect.ListType():
            yield from _list(info, value, loc)
        case inspect.DictType():
            yield from _dict(info, value, loc)
        case inspect.StructType():
            yield from _struct(info, value, loc)
        case inspect.NoneType():
            if value is not None:
                yield Failure(loc, "Input should be None", "none_required", show(value))
        case _:  # a free JSON value
            return


def _number(info: inspect.IntType | inspect.FloatType, value: object, loc: Loc) -> Iterator[Failure]:
    integer = isinstance(info, inspect.IntType)
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        kind = "integer" if integer else "number"
        yield Failure(loc, f"Input should be a valid {kind}", "int_type" if integer else "float_type", show(value))
    elif not math.isfinite(value) if isinstance(value, float) else False:
        yield Failure(loc, "Input should be a finite number", "finite_number", show(value))
    elif info.ge is not None and value < info.ge:
        message = f"Input should be greater than or equal to {info.ge}"
        yield Failure(loc, message, "greater_than_equal", show(value))
    elif info.le is not None and value > info.le:
        yield Failure(loc, f"Input should be less than or equal to {info.le}", "less_than_equal", show(value))


def _list(info: inspect.ListType, value: object, loc: Loc) -> Iterator[Failure]:
    if not isinstance(value, list | tuple):
        yield Failure(loc, "Input should be a valid list", "list_type", show(value))
        return
    n = len(value)
    if info.min_length is not None and n < info.min_length:
        message = f"List should have at least {_many(info.min_length, 'item')} after validation, not {n}"
        yield Failure(loc, message, "too_short")
    if info.max_length is not None and n > info.max_length:
        message = f"List should have at most {_many(info.max_length, 'item')} after validation, not {n}"
        yield Failure(loc, message, "too_long")
    for i, item in enumerate(value):
        yield from _check(info.item_type, item, (*loc, i))


def _dict(info: inspect.DictType, value: object, loc: Loc) -> Iterator[Failure]:
    if not isinstance(value, Mapping):
        yield Failure(loc, "Input should be a valid dictionary", "dict_type", show(value))
        return
    for key, item in value.items():
        at = (*loc, show(key) if not isinstance(key, str) else key[:100])
        yield from _check(info.key_type, key, at)
        yield from _check(info.value_type, item, at)


def _union(info: inspect.UnionType, value: object, loc: Loc) -> Iterator[Failure]:
    """The branch that takes this JSON type speaks alone; when none does, each says what it wants."""
    if value is None and info.includes_none:
        return
    branches = [t for t in info.types if not isinstance(t, inspect.NoneType)]
    if len(branches) == 1:
        yield from _check(branches[0], value, loc)
        return
    for branch in branches:
        if _takes(branch, value):
            yield from _check(branch, value, loc)
            return
    for branch in branches:
        yield from _check(branch, value, (*loc, _label(branch)))


def _takes(info: inspect.Type, value: object) -> bool:
    kinds: dict[type[inspect.Type], Callable[[object], bool]] = {
        inspect.IntType: lambda v: isinstance(v, int) and not isinstance(v, bool),
        inspect.FloatType: lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        inspect.StrType: lambda v: isinstance(v, str),
        inspect.LiteralType: lambda v: isinstance(v, str) and v in getattr(info, "values", ()),
        inspect.BoolType: lambda v: isinstance(v, bool),
        inspect.ListType: lambda v: isinstance(v, list | tuple),
        inspect.DictType: lambda v: isinstance(v, Mapping),
        inspect.StructType: lambda v: isinstance(v, Mapping),
    }
    return kinds[type(info)](value)


def _label(info: inspect.Type) -> str:
    """How a union branch is named in a path: ``int``, ``list[str]``, ``literal['low','high']``, ``PredictedOutput``."""
    match info:
        case inspect.LiteralType():
            return "literal[" + ",".join(repr(v) for v in info.values) + "]"
        case inspect.ListType():
            return f"list[{_label(info.item_type)}]"
        case inspect.StructType():
            return info.cls.__name__
        case inspect.UnionType():
            return "union[" + ",".join(_label(t) for t in info.types) + "]"
        case _:
            return type(info).__name__.removesuffix("Type").lower()


def _either(values: tuple[object, ...]) -> str:
    shown = [repr(v) for v in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _many(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"
