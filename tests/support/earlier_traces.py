"""Traces that earlier code recorded, and digests of the data that code read from them.

    python -m support.earlier_traces NAME ...

writes the digests of traces as the present code reads them into `expected.json`; see
`tests/fixtures/traces/README.md`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from flexinspect.records.step import MASK_ARRAYS
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.trace_dump import DumpSelection, dump_json, dump_text
from support.paths import TESTS

FOLDER = TESTS / "fixtures" / "traces"
EXPECTED = FOLDER / "expected.json"
NAMES = tuple(sorted(path.name.split(".")[0] for path in FOLDER.glob("*.flextrace.zst")))

Digests = dict[str, list[Any]]
"""By section or stream: the number of its rows, and a digest of them."""

_LATER_MASK_KEYS = ("mask_mod_code", "added", "uniform_rows", "mask_mod_blocks")
_LATER_KEYS = {"anomaly_origin": ("module",), "steps": ("gpus", "lens")}
"""By the name of an object in the JSON: keys that came later."""
_OLD_DECLARED_KEYS = {
    "segments": "pieces",
    "tokenizer": "words",
    "mask_mod": "rule",
    "prefix_stops": "head",
    "local_starts": "low",
}
_OLD_KEYS = {
    "builds": {"mask_mod": "rule"},
    "calls": {
        "lse_error": "gate",
        "check_kind": "gate_kind",
        "mask_passed_to_layer": "handed",
        "suppressed_exception": "swallowed",
    },
    "gradients": {"logits_error": "gate", "runner_up_id": "rival"},
    "training": {"n_nonfinite": "n_sick", "anomaly_origin": "producer"},
    "anomaly_origin": {"n_affected": "n_carriers"},
    "masks": {"mask_mod": "rule", "mask_mod_source": "rule_source"},
    "declared": _OLD_DECLARED_KEYS,
    "change": _OLD_DECLARED_KEYS,
    "data": {"is_running": "entered", "description": "what"},
    "evidence": {
        "anomaly_message": "said",
        "anomaly_origin": "producer",
        "check_error": "gate",
        "mask_mod": "rule",
        "mask_passed_to_layer": "handed",
        "received": "fed",
        "reported_by": "told by",
        "suppressed_exception": "swallowed",
        "tokens alone and in the prompt": "tokens alone and fed",
        "tolerance": "bar",
    },
}
"""By the name of an object in the JSON: the keys of version 1, by those of today."""

_OLD_EVENT_KINDS = {
    "batched-input": "batch",
    "breakpoint-not-evaluated": "breakpoint-unknown",
    "cache-disabled": "no-cache",
    "cache-overwritten": "keys-changed",
    "cache-switched": "other-cache",
    "chunked-input": "several-rows",
    "control-server": "control",
    "detail-reduced": "thinned",
    "generate-not-followed": "not-followed",
    "gradients-cost": "cost",
    "gradients-dense-fallback": "gradients-by-reference",
    "hook-disabled": "hook-off",
    "hooks-reinstalled": "hooks-again",
    "kernel-did-not-return": "not-returned",
    "learned-positions": "learnt-positions",
    "model-kept-alive": "holding",
    "no-input-ids": "no-ids",
    "not-attention-weights": "no-weights",
    "not-recorded": "unseen",
    "parameters-changed": "parameters",
    "parameters-without-gradient": "unreached",
    "resumed": "continued",
    "rule-disabled": "rule-off",
    "segments-not-found": "segments",
    "step-not-recorded": "step-unread",
}
_OLD_RULE_NAMES = {
    "attention_shape": "attention shape",
    "batch_padding": "paddings",
    "call_facts": "call facts",
    "prompt": "fed",
    "row_roles": "roles",
    "same_prompt": "twins",
    "training_steps": "trainingsteps",
    "unread_keys": "columns",
}
_OLD_FINDING_IDS = {
    "gradient.check-failed": "gradient.gate",
    "observer.check-failed": "observer.gate",
    "same-prompt.differ": "twins.differ",
    "same-prompt.rounding": "twins.rounding",
    "same-prompt.same": "twins.same",
}
_OLD_VALUES = {
    "id": _OLD_FINDING_IDS,
    "kind": _OLD_EVENT_KINDS,
    "loss_source": {"reported": "told"},
    "rules": _OLD_RULE_NAMES,
}
"""By the name under which they are found: the values of earlier code, by those of today."""

_OLD_ARRAYS = {"uniform_rows": "averaged", "mask_mod_blocks": "ruled"}
_DATA = re.compile(r'"(?:[^"\\]|\\.)*"|[-\d]?\d[\w.:+-]*')
_SECTIONS = ("trace", "run", "generation", "masks", "findings", "events", "output")


def unpack(name: str, folder: Path) -> Path:
    """Write a recorded trace, with its -wal file if it has one, to `folder`."""
    for packed in FOLDER.glob(f"{name}.flextrace*.zst"):
        data = zstandard.ZstdDecompressor().decompress(packed.read_bytes())
        (folder / packed.name.removesuffix(".zst")).write_bytes(data)
    return folder / f"{name}.flextrace"


def json_digests(dump: Mapping[str, Any]) -> Digests:
    """Return the digests of the sections of `dump --json`, without keys that came later."""
    masks = [
        {key: value for key, value in mask.items() if key not in _LATER_MASK_KEYS}
        for mask in dump["masks"]
    ]
    run = {**dump["run"], "rules": _with_old_names(dump["run"]["rules"], "rules")}
    sections = {**_with_old_names({**dump, "masks": masks}), "run": run}
    return {
        name: [len(rows), _digest(json.dumps(rows, sort_keys=True))]
        for name, rows in sections.items()
    }


def _with_old_names(value: Any, name: str = "") -> Any:
    """Return JSON with the names of version 1; `name` is the key under which it was found."""
    if isinstance(value, list):
        return [_with_old_names(item, name) for item in value]
    if not isinstance(value, dict):
        return _OLD_VALUES.get(name, {}).get(value, value)
    old, later = _OLD_KEYS.get(name, {}), _LATER_KEYS.get(name, ())
    return {
        old.get(key, key): _with_old_names(item, key)
        for key, item in value.items()
        if key not in later
    }


def text_digests(text: str) -> Digests:
    """Return the digests of the numbers and quoted strings in the sections of `dump`."""
    found: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in text.splitlines():
        title = line.split("  ")[0].split(" ")[0]
        if title in _SECTIONS:
            section = title
        if section == "run" and line.strip().startswith("rules"):
            for new, old in _OLD_RULE_NAMES.items():
                line = line.replace(f'"{new}"', f'"{old}"')
        if not line.strip().startswith(_LATER_MASK_KEYS):
            found[section] += _DATA.findall(_with_old_keys(line, section))
    return {name: [len(values), _digest("\n".join(values))] for name, values in found.items()}


def _with_old_keys(line: str, section: str) -> str:
    """Return a line of `dump` whose JSON has the keys of version 1."""
    names = {"generation": "declared", "findings": "evidence", "events": "data"}
    for new, old in _OLD_KEYS.get(names.get(section, ""), {}).items():
        line = line.replace(f'"{new}": ', f'"{old}": ')
    return line


def array_digests(reader: TraceReader) -> dict[str, Any]:
    """Return shape, dtype and digest of every array of a trace, by place or mask and stream."""
    steps: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    for generation in reader.generations():
        for branch in reader.branches(generation.generation):
            for step in reader.steps(generation.generation, branch.branch):
                place = (generation.generation, step.step, branch.branch)
                for info in reader.arrays(*place):
                    array = reader.array(*place[:2], info.stream, info.layer, place[2])
                    key = (place[0], place[2], place[1], info.stream, info.layer)
                    steps[" ".join(map(str, key))] = _array_digest(array)
                for call in reader.calls(*place):
                    for name in {call.mask, call.mask_passed_to_layer} - {None}:
                        mask = reader.mask(str(name))
                        if mask is not None:
                            masks[str(name)] = {
                                part: _array_digest(getattr(mask, part)) for part in MASK_ARRAYS
                            }
    return {"steps": steps, "masks": masks}


def stream_digests(arrays: Mapping[str, Any]) -> Digests:
    """Return the digests of `array_digests`, by stream."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, digest in sorted(arrays["steps"].items()):
        found[key.split(" ")[3]].append(f"{key} {digest}")
    for fingerprint, parts in sorted(arrays["masks"].items()):
        for part, digest in parts.items():
            if digest is not None:
                found[f"mask.{_OLD_ARRAYS.get(part, part)}"].append(f"{fingerprint} {digest}")
    return {name: [len(lines), _digest("\n".join(lines))] for name, lines in found.items()}


def trace_digests(path: Path) -> dict[str, Digests]:
    """Return all digests of a trace."""
    with open_trace(path) as reader:
        selection = DumpSelection(reader)
        return {
            "json": json_digests(json.loads("".join(dump_json(selection)))),
            "text": text_digests("".join(dump_text(selection))),
            "arrays": stream_digests(array_digests(reader)),
        }


def _array_digest(array: Any) -> list[Any] | None:
    if array is None:
        return None
    data = np.ascontiguousarray(array).tobytes()
    return [list(array.shape), str(array.dtype), hashlib.sha256(data).hexdigest()[:16]]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_expected(digests: Mapping[str, Mapping[str, Digests]]) -> None:
    """Write `expected.json`, a section per line."""
    lines: list[str] = []
    for name, kinds in sorted(digests.items()):
        body = ",\n".join(
            f"  {json.dumps(kind)}: {{\n{_section_lines(sections.items())}\n  }}"
            for kind, sections in kinds.items()
        )
        lines.append(f" {json.dumps(name)}: {{\n{body}\n }}")
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _section_lines(sections: Iterable[tuple[str, Sequence[Any]]]) -> str:
    return ",\n".join(f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in sections)


def main(names: Sequence[str]) -> None:
    """Add the digests of traces to `expected.json`, or replace them."""
    digests = json.loads(EXPECTED.read_text("utf-8"))
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            digests[name] = trace_digests(unpack(name, Path(folder)))
    write_expected(digests)


if __name__ == "__main__":
    main(sys.argv[1:])
