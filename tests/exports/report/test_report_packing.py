"""Packed contents can be unpacked again, and JSON in a script never ends the script."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from flexinspect.core.conversion import script_json
from flexinspect.exports.report.packing import ALIGNMENT, TYPES, pack, packed_size

NUMPY_TYPES = {name: dtype for dtype, name in TYPES.items()}


class Sample(Struct):
    text: str
    arrays: list[Any]


def unpack(packed: str) -> dict[str, Any]:
    """Do what the page does in data.js."""
    data = zlib.decompress(base64.b64decode(packed), -zlib.MAX_WBITS)
    length = int.from_bytes(data[:4], "little")
    start = -(-(4 + length) // ALIGNMENT) * ALIGNMENT

    def restore(value: Any) -> Any:
        if isinstance(value, dict) and "$" in value:
            name, offset, shape = value["$"]
            dtype = NUMPY_TYPES[name].newbyteorder("<")
            count = int(np.prod(shape))
            return np.frombuffer(data, dtype, count, start + offset).reshape(shape)
        if isinstance(value, dict):
            return {key: restore(each) for key, each in value.items()}
        return [restore(each) for each in value] if isinstance(value, list) else value

    found: dict[str, Any] = restore(json.loads(data[4 : 4 + length]))
    return found


@given(st.text(), st.lists(st.sampled_from([*TYPES]), max_size=6), st.integers(0, 9))
def test_arrays_and_texts_survive_packing(text: str, dtypes: list[Any], n: int) -> None:
    arrays = [np.arange(n * 3).reshape(n, 3).astype(dtype) for dtype in dtypes]
    sample = Sample(text, arrays)
    found = unpack(pack(sample))
    assert found["text"] == text
    assert len(found["arrays"]) == len(arrays)
    for own, array in zip(found["arrays"], arrays, strict=True):
        assert own.dtype == array.dtype
        np.testing.assert_array_equal(own, array)
    assert packed_size(sample) == len(pack(sample))


def test_the_packed_text_is_base64_only() -> None:
    packed = pack(Sample("</script><!--", [np.zeros(9, np.float32)]))
    assert base64.b64decode(packed, validate=True)


def test_a_type_that_the_page_does_not_know_is_refused() -> None:
    with pytest.raises(KeyError):
        pack(Sample("", [np.zeros(1, np.int64)]))
    with pytest.raises(TypeError, match="object cannot be packed"):
        pack(Sample("", [object()]))


@given(st.text() | st.sampled_from(["</script>", "<!--", "<script", "\u2028", "&lt;"]))
def test_json_in_a_script_holds_no_markup_and_the_same_text(text: str) -> None:
    written = script_json({"text": [text]})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"text": [text]}
