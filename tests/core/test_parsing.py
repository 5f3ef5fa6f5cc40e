"""JSON and TOML that cannot be read raise `ValueError`, soon and with little memory."""

from __future__ import annotations

import pytest

from flexinspect.core.parsing import MAX_TOML_BYTES, parse_json, parse_toml

DEEP = 100_000


@pytest.mark.parametrize(
    "text", ["[" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * 10_000, "", "nan\0"]
)
def test_json_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        *("a = " + "[" * DEEP, "x = " + "9" * 10_000, "a\0 = 1"),
        *(f"{'.'.join('a' * DEEP)} = 1", f"[{'.'.join('a' * DEEP)}]", "#" * (MAX_TOML_BYTES + 1)),
    ],
)
def test_toml_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_toml(text)


def test_toml_that_can_be_read() -> None:
    assert parse_toml('a.b = 1\ntext = """\nhttps://a.b.c.d\n"""') == {
        "a": {"b": 1},
        "text": "https://a.b.c.d\n",
    }
