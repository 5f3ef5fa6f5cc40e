"""Traces recorded by earlier code: each opens and has the data that the earlier code read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.earlier_traces import EXPECTED, NAMES, trace_digests, unpack

from flexinspect.trace.reader import open_trace
from flexinspect.trace.trace_dump import DumpSelection, dump_json

EXPECTED_DIGESTS: dict[str, Any] = json.loads(EXPECTED.read_text("utf-8"))


def test_every_recorded_trace_has_expected_digests() -> None:
    assert {*NAMES} == {*EXPECTED_DIGESTS}


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_trace_gives_the_same_data(name: str, tmp_path: Path) -> None:
    assert trace_digests(unpack(name, tmp_path)) == EXPECTED_DIGESTS[name]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("generation", "finished"),
        ("interrupted", "recording"),
        ("program", "failed"),
        ("watch", "interrupted"),
    ],
)
def test_an_earlier_trace_keeps_its_state(name: str, state: str, tmp_path: Path) -> None:
    with open_trace(unpack(name, tmp_path)) as reader:
        assert reader.state == state


def test_json_describes_every_array_of_a_compiled_call(tmp_path: Path) -> None:
    with open_trace(unpack("program", tmp_path)) as reader:
        dump = json.loads("".join(dump_json(DumpSelection(reader))))
        (ruled,) = [mask for mask in dump["masks"] if mask["ruled"] and mask["q_len"] == 256]
        record = reader.mask(ruled["fingerprint"])
        assert record is not None
        assert record.ruled is not None
        assert ruled["ruled"] == {"shape": [1, 4, 4], "open": int((record.ruled > 0).sum())}
        averaged = [mask["averaged"] for mask in dump["masks"] if mask["averaged"]]
        assert [entry["shape"][0] for entry in averaged] == [1]
