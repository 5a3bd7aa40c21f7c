"""What a JSON Schema finds wrong, in words that tell an admin what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

Path = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[\w@+-]+")
_TYPES = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "nothing",
}


def show(path: Sequence[str | int]) -> str:
    """A path as an admin reads it: ``queues.Everyone.members[0]``, a key with blanks in quotes."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step[:100], ensure_ascii=False)}]"
    return text


@dataclass(frozen=True, slots=True)
class Fault:
    """One finding: `path` to the value, or to the key if ``of_key``; what is wrong; how to fix it."""

    path: Path
    what: str
    fix: str
    of_key: bool = False


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of `known` that `word` is likely meant to be, as a question; empty when none is near.

    `cutoff` is difflib's, 0 to 1: words that share a long part, as emails do, need a higher one.
    """
    # Compared without case, the likeliest slip; cut, because difflib takes quadratic time.
    folded = {name.casefold(): name for name in sorted(known, reverse=True)}
    near = get_close_matches(word[:100].casefold(), folded, n=1, cutoff=cutoff)
    return f'did you mean "{folded[near[0]]}"?' if near else ""


def one_of(known: Iterable[str]) -> str:
    """A fix that lists what there is, the first twelve of it."""
    names = sorted(set(known))
    shown = ", ".join(f'"{name}"' for name in names[:12])
    return f"use one of {shown}" + (", ..." if len(names) > 12 else "") if names else "there is none to name yet"


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A fix that proposes the nearest of `known`, or lists them when none is near."""
    return nearest(word, known) or one_of(known)


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, Sequence) else "a number"


def _words(types: str | Sequence[str]) -> str:
    return " or ".join(_TYPES[t] for t in ([types] if isinstance(types, str) else types))


def _keys(error: ValidationError, path: Path) -> Iterator[Fault]:
    """Keys that are not known, or missing: one fault each, where jsonschema has one for all."""
    value, schema = cast("Any", error.instance), cast("Any", error.schema)
    if error.validator == "required":
        for name in cast("Any", error.validator_value):
            if name not in value:
                what = f'the key "{name}" is missing'
                yield Fault(path, what, schema.get("properties", {}).get(name, {}).get("description") or "add it")
        return
    known = schema.get("properties", {})
    unknown = [name for name in value if name not in known]
    for count, name in enumerate(unknown):
        # Looking for near names is slow; beyond twenty the file is of some other kind and nobody reads on.
        fix = did_you_mean(name, known.keys()) if count < 20 else "remove it"
        yield Fault((*path, name), "is not a known key", fix, of_key=True)


def _one(error: ValidationError, path: Path) -> Fault:
    schema, limit = cast("Any", error.schema), cast("Any", error.validator_value)
    fix = schema.get("description") or ""
    match error.validator:
        case "type":
            return Fault(path, f"must be {_words(limit)}, not {_kind(error.instance)}", fix or f"write {_words(limit)}")
        case "enum":
            word = str(error.instance)
            return Fault(
                path, f'"{word[:60]}" is not a choice', nearest(word, limit) or fix or did_you_mean(word, limit)
            )
        case "const":
            return Fault(path, f"must be {limit}", fix or f"write {limit}")
        case "minimum" | "maximum":
            low, high = schema.get("minimum", "any"), schema.get("maximum", "any")
            return Fault(path, f"must lie between {low} and {high}", fix or "write a number in this range")
        case "minItems" | "minProperties" | "minLength":
            return Fault(path, "is empty" if limit == 1 else f"is shorter than {limit}", fix or "fill it or remove it")
        case "maxProperties":
            return Fault(path, f"holds more than {limit} keys", fix or "remove some")
        case "maxItems" | "maxLength":
            return Fault(path, f"is longer than {limit}", fix or "shorten it")
        case "uniqueItems":
            return Fault(path, "holds the same entry twice", "remove one of them")
        case _:
            return Fault(path, "does not have the right form", fix or f"see the schema: {error.validator} {limit}")


@cache
def validator(name: str) -> Draft202012Validator:
    """The validator of a schema that is packaged with ``connector``, by its file name."""
    schema = json.loads(files("connector").joinpath(name).read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def faults(schema: str, value: Any) -> Iterator[Fault]:
    """Everything that the packaged schema `schema` finds wrong with `value`, each with its remedy."""
    seen: set[Fault] = set()
    for error in validator(schema).iter_errors(value):
        path = tuple(error.absolute_path)
        if "propertyNames" in error.absolute_schema_path:
            fault = _one(error, (*path, str(error.instance)))
            yield Fault(fault.path, fault.what, fault.fix, of_key=True)
            continue
        keyed = error.validator in ("additionalProperties", "required") and isinstance(error.instance, Mapping)
        for fault in _keys(error, path) if keyed else (_one(error, path),):
            # Several missing keys come as several errors that each name all: the first says it.
            if fault not in seen:
                seen.add(fault)
                yield fault
