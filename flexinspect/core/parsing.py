"""JSON and TOML that somebody else wrote: whatever is wrong with it raises `ValueError`."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

MAX_TOML_BYTES = 1 << 20
"""Size of a TOML text at most: `tomllib` reads about 1 MB in a second."""
_DEEP_KEY = re.compile(r"^(?:[^=#.\n]*\.){50}", re.MULTILINE)
"""A dotted key of more than 50 parts: `tomllib` takes memory by the square of their number."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError`, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise _plain_error(error) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises `ValueError`, also if it is larger than `MAX_TOML_BYTES` or nested too deeply.
    """
    import tomllib

    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it has more than {MAX_TOML_BYTES >> 20} MiB")
    if _DEEP_KEY.search(text):
        raise ValueError("a key is nested too deeply")
    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        raise _plain_error(error) from None


def _plain_error(error: Exception) -> ValueError:
    """Return the error for a text, in words where Python's own are about its internals."""
    if isinstance(error, RecursionError):
        return ValueError("it is nested too deeply")
    if isinstance(error, ValueError) and "digits" not in str(error):
        return error
    return ValueError(f"a number has more than {sys.get_int_max_str_digits()} digits")
