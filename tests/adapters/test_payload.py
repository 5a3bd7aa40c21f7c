"""Reading hostile and odd bodies."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import payload
from adapters.base import Unreadable
from adapters.payload import ANSWER, MAX_TEXT, Fields, Limits, read_json


def slug(call: Callable[[], Any]) -> str:
    with pytest.raises(Unreadable) as caught:
        call()
    return caught.value.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not_json"),
        (b"{", "not_json"),
        (b"{'a': 1}", "not_json"),
        (b'\xef\xbb\xbf{"a": 1}', "not_json"),
        (b'"a\x00b"', "not_json"),
        (b'"\xff"', "not_utf8"),
        ('"\ud800"'.encode("utf-8", "surrogatepass"), "not_utf8"),
        ('{"a": 1}'.encode("utf-16"), "not_utf8"),
        (b"NaN", "not_finite"),
        (b'{"a": [Infinity]}', "not_finite"),
        (b"-Infinity", "not_finite"),
        (b"1e400", "not_finite"),
        (b"-1.5E+309", "not_finite"),
        (b"1e-400", "not_finite"),
        (b"1e99999999999999999999", "not_finite"),
        (b"1" * 101, "long_number"),
        (b"1" * 5000, "long_number"),
        (b"1." + b"0" * 5000, "long_number"),
        (b"[" * 65 + b"]" * 65, "too_deep"),
        (b"[" * 100_000, "too_deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "too_deep"),
        (b'["' + b"[" * 200 + b'", ' + b"[" * 64 + b"]" * 64 + b"]", "too_deep"),
        (b"[" + b"1," * 500 + b"1]", "too_many_elements"),
        (json.dumps({"a": {"b": [0] * 501}}).encode(), "too_many_elements"),
        (json.dumps({str(i): 0 for i in range(10_001)}).encode(), "too_many_keys"),
        (json.dumps([{str(i): 0 for i in range(101)}] * 100).encode(), "too_many_keys"),
        (b'"' + b"x" * (1 << 20) + b'"', "too_big"),
    ],
)
def test_bodies_that_are_refused(body: bytes, reason: str) -> None:
    assert slug(lambda: read_json(body)) == reason


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"[" * 64 + b"]" * 64, None),
        (b'"' + b"[{" * 500 + b'"', "[{" * 500),
        (b'["\\"' + b"[" * 100 + b'", "\\\\", ' + b"[" * 62 + b"]" * 63, None),
        (b"[" + b"1," * 499 + b"1]", [1] * 500),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b"0.10", Decimal("0.10")),
        (b"1e300", Decimal("1e300")),
        (b"0e-400", Decimal(0)),
        (b"1" * 100, int("1" * 100)),
        (b'"a\\u0000b"', "ab"),
        (b'{"k\\u0000": "\\ud800x\\udc00"}', {"k": "\ufffdx\ufffd"}),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (rb'"a literal \\u0000 stays"', r"a literal \u0000 stays"),
        (b'"' + b"x" * (MAX_TEXT + 9) + b'"', "x" * MAX_TEXT),
        (b" null ", None),
    ],
)
def test_bodies_that_are_read(body: bytes, value: Any) -> None:
    read = read_json(body)
    assert value is None or read == value


def test_an_answer_may_be_wider_than_a_delivery() -> None:
    body = json.dumps([{"k": 1}] * 5000).encode()
    assert len(read_json(body, ANSWER)) == 5000
    assert slug(lambda: read_json(body, Limits(max_bytes=10))) == "too_big"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80) | st.text(alphabet='[]{}",:\\u0d8tNaIn1e+-. ', max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused_in_one_way(body: bytes) -> None:
    try:
        value = read_json(body)
    except Unreadable:
        return
    text = json.dumps(value, default=str, ensure_ascii=False)
    text.encode()
    assert "\x00" not in text


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=20), lambda c: st.lists(c, max_size=4))
)
def test_reading_gives_back_what_was_written(value: Any) -> None:
    def storable(v: Any) -> Any:
        return [storable(x) for x in v] if isinstance(v, list) else payload.clean(v) if isinstance(v, str) else v

    assert read_json(json.dumps(value).encode()) == storable(value)


@pytest.mark.parametrize("value", [7, "7", "L-1001", "a.b", "00Q~x", "a@b=c+d:e_f"])
def test_ids(value: Any) -> None:
    assert payload.ref(value) == str(value)


@pytest.mark.parametrize(
    "value", [0, -1, True, None, "", ".", "..", "...", "a/b", "a,b", "a b", "a\n", "é", "x" * 129, 1.5, [], {}, 10**40]
)
def test_what_is_no_id(value: Any) -> None:
    assert slug(lambda: payload.ref(value)) == "wrong_type"


@pytest.mark.parametrize(
    ("text", "number"),
    [("(303) 555-0142", "3035550142"), (" +1 303 555 0142", "+13035550142"), ("none", None), ("+", None), ("", None)],
)
def test_phones(text: str, number: str | None) -> None:
    assert payload.phone(text) == number


def test_emails() -> None:
    assert payload.email(" Petra@Example.com ") == "petra@example.com"
    assert payload.email("n/a") is None


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("90", 90), (None, 120), ("", 120), ("-1", 120), ("x", 120)])
def test_seconds(text: str | None, expected: int) -> None:
    assert payload.seconds(text, dt.timedelta(seconds=120)) == dt.timedelta(seconds=expected)


def test_the_slug_of_a_missing_field() -> None:
    assert payload.missing("resourceIds").reason == "missing_resource_ids"
    assert payload.missing("webhook-id").reason == "missing_webhook_id"


GOOD: list[tuple[str, Any, Any]] = [
    ("text", "  a ", "a"),
    ("text", " ", None),
    ("text", None, None),
    ("text", 80202, "80202"),
    ("text", Decimal("1.50"), "1.50"),
    ("number", 5, Decimal(5)),
    ("number", Decimal("5.25"), Decimal("5.25")),
    ("number", " 5.25 ", Decimal("5.25")),
    ("number", "", None),
    ("number", None, None),
    ("time", "2026-04-06T11:15:00+02:00", dt.datetime(2026, 4, 6, 9, 15, tzinfo=dt.UTC)),
    ("time", "2026-04-06 09:15:00", dt.datetime(2026, 4, 6, 9, 15, tzinfo=dt.UTC)),
    ("time", "2026-04-06T09:15:00Z", dt.datetime(2026, 4, 6, 9, 15, tzinfo=dt.UTC)),
    ("time", None, None),
    ("time", "", None),
    ("flag", True, True),
    ("flag", 0, False),
    ("flag", None, None),
    ("items", [1], [1]),
    ("items", None, []),
    ("texts", ["a", 1, "a", None, ""], ("a", "1")),
    ("optional_ref", 0, None),
    ("optional_ref", "", None),
    ("optional_ref", None, None),
    ("optional_ref", 7, "7"),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("reader", "value", "expected"), GOOD)
def test_fields_that_can_be_read(reader: str, value: Any, expected: Any, strict: bool) -> None:
    assert getattr(Fields({"k": value}, strict=strict), reader)("k") == expected


BAD: list[tuple[str, Any, Any]] = [
    ("text", True, None),
    ("text", ["a"], None),
    ("text", {}, None),
    ("number", "5,000", None),
    ("number", "1e5", None),
    ("number", True, None),
    ("number", 10**18, None),
    ("number", [], None),
    ("time", 1775466900, None),
    ("time", "yesterday", None),
    ("time", "0001-01-01T00:00:00+14:00", None),
    ("time", {}, None),
    ("flag", "yes", None),
    ("flag", 2, None),
    ("items", "a", []),
    ("items", {}, []),
    ("texts", ["a", []], ("a",)),
]


@pytest.mark.parametrize(("reader", "value", "lenient"), BAD)
def test_fields_of_the_wrong_type(reader: str, value: Any, lenient: Any) -> None:
    assert slug(lambda: getattr(Fields({"k": value}, strict=True), reader)("k")) == "wrong_type"
    assert getattr(Fields({"k": value}, strict=False), reader)("k") == lenient


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("value", [True, False, [], {}, "a b", -4, Decimal("1.5")])
def test_no_owner_is_ever_guessed(value: Any, strict: bool) -> None:
    assert slug(lambda: Fields({"k": value}, strict=strict).optional_ref("k")) == "wrong_type"


def test_what_is_required() -> None:
    fields = Fields({"null": None, "list": [], "text": "x", "long": "x" * 201}, strict=False)
    assert fields.required_text("text") == "x"
    assert slug(lambda: fields.required_text("gone")) == "missing_gone"
    assert slug(lambda: fields.required_text("list")) == "wrong_type"
    assert slug(lambda: fields.required_text("long")) == "wrong_type"
    assert slug(lambda: fields.ref("null")) == "missing_null"
    assert slug(lambda: Fields([], strict=False)) == "wrong_type"


def test_objects_and_custom_fields() -> None:
    fields = Fields({"o": {"a": 1}, "l": [{"a": 2}, 3], "n": {"x": {}}}, strict=False)
    assert fields.object("o").text("a") == "1"
    assert fields.object("l").data == {}
    assert [o.text("a") for o in fields.objects("l")] == ["2"]
    strict = Fields(fields.data, strict=True)
    assert slug(lambda: strict.object("l")) == "wrong_type"
    assert slug(lambda: strict.objects("l")) == "wrong_type"
    custom = Fields({"a": True, "b": [1, "x"], "c": None, "d": "", "e": [], "f": Decimal("1.5")}, strict=True)
    assert custom.scalars(custom.data) == {"a": True, "b": (1, "x"), "f": Decimal("1.5")}
    for nested in ({}, {"a": 1}, [[1]], [None]):
        assert slug(lambda n=nested: Fields({"k": n}, strict=True).scalars(["k"])) == "wrong_type"
        assert Fields({"k": nested}, strict=False).scalars(["k"]) == {}


@pytest.mark.parametrize(
    ("value", "zone"),
    [("America/Chicago", "America/Chicago"), ("Central", None), ("../UTC", None), (5, None), ("", None)],
)
def test_zones(value: Any, zone: str | None) -> None:
    assert Fields({"k": value}, strict=True).zone("k") == zone
