"""The finding of an exception that ended a generation or a program: where, on what, and which.

Every event of kind "error" gives one, unless another finding is about the same exception: memory
that ran out, or a kernel call that raised it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from msgspec.structs import replace

from flexinspect.core.errors import is_out_of_memory
from flexinspect.core.text import printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import fill_from_kind, finding_kinds
from flexinspect.rules.numerics.out_of_memory import out_of_memory_finding

ERROR_EVENT = "error"
RAISED, RULE_RAISED = "run.exception", "mask.rule-raised"
_KINDS = finding_kinds(RAISED, RULE_RAISED)
_MASK_FIX = (
    "Look at the line and the mask that the sentence names: a BlockMask is for FlexAttention only, "
    "a 4D mask for forwards and not for generate."
)
_MAX_MESSAGE, _MAX_CODE = 200, 60
_NOT_FAILURES = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError")


def failure_finding(event: EventRecord, generation: int = 0) -> Finding | None:
    """Return the finding of an event of kind "error", None for other events and for exits.

    `generation` is that of the finding if the event has none.
    """
    memory = out_of_memory_finding(event, generation)
    return exception_finding(event, generation) if memory is None else memory


def exception_finding(event: EventRecord, generation: int = 0) -> Finding | None:
    """Return the finding of an exception, None for exits and for memory that ran out."""
    name = event.text.partition(":")[0].rpartition(".")[2]
    if event.kind != ERROR_EVENT or name in _NOT_FAILURES or is_out_of_memory(event.text):
        return None
    data = event.data
    rule = data.get("rule")
    id_ = RAISED if rule is None else RULE_RAISED
    sentence = _sentence(event)
    if rule is not None:
        sentence = rule_sentence(f"{_what_ended(event)}: {format_error(event)}", event, data)
    kind = _KINDS[id_]
    # Programs leave `generate` early with exceptions of their own.
    is_signal = data.get("is_deliberate") and data.get("during")
    severity = Severity.NOTE if is_signal else kind.severity
    evidence = {name: value for name, value in data.items() if name != "traceback"}
    layer = data.get("layer")
    fix = _MASK_FIX if id_ == RAISED and data.get("mask") else ""
    found = Finding(
        id_, severity, sentence, layer=layer, evidence=evidence, step=event.step, fix=fix
    )
    place = generation if event.generation is None else event.generation
    return fill_from_kind(kind, replace(found, generation=place))


def _sentence(event: EventRecord) -> str:
    data = event.data
    if data.get("is_own"):
        return f"{_what_ended(event)}: {printable(event.text.partition(': ')[2])}"
    parts = [f"{_what_ended(event)}{_format_place(data)}", *mask_sentences(data)]
    return f"{'. '.join(parts)}. It raised {format_error(event)}."


def mask_sentences(data: Mapping[str, Any]) -> list[str]:
    """Return which mask was received, without a period, and that it is of the wrong kind."""
    mask, path = data.get("mask"), data.get("implementation", "")
    if not mask:
        return []
    article = "an" if mask[0] in "aeiou" else "a"  # an int64 tensor
    told = f"The mask that it received is {article} {printable(mask)}"
    if mask.startswith("BlockMask") and path and "flex" not in path:
        told += f", which only FlexAttention takes, and these layers run '{printable(path)}'"
    return [told]


def rule_sentence(what: str, event: EventRecord, place: Mapping[str, Any]) -> str:
    """Return what ended and why, followed by what a mask_mod or score_mod reads and gives.

    `event` has the rule, `place` the frame of the program that is named last.
    """
    rule = event.data["rule"]
    where = f"{PurePath(rule['file']).name}:{rule['line']}"
    name = printable(rule["name"])
    parts = [what, f"It comes from the {rule['kind']} {name} ({printable(where)})"]
    if captured := rule.get("captured"):
        parts[-1] += f", which reads {printable('; '.join(captured))}"
    parts += [_probe_sentence(rule, probe) for probe in rule.get("probes", ())]
    frame = place.get("frame") or {}
    if frame and frame.get("line") != rule["line"]:
        parts.append(f"The last line of your code is {format_frame(place)}")
    return f"{'. '.join(parts)}."


def _probe_sentence(rule: Mapping[str, Any], probe: Mapping[str, Any]) -> str:
    row, key = probe["cell"]
    called = f"For 0-dim tensors of row {row} and key {key} it"
    if "raises" in probe:
        return f"{called} raises {printable(shorten(probe['raises']))}"
    told = f"{called} gives {printable(probe['gives'])}"
    if rule["kind"] == "mask_mod" and not probe["gives"].endswith("()"):
        told += ", and it must give one bool of shape ()"
    return told


def _what_ended(event: EventRecord) -> str:
    if event.generation is None:
        called = event.data.get("during")
        return f"A call of {called} ended before its first step" if called else "The program ended"
    if event.step is None:
        return f"Generation {event.generation} ended"
    return f"Generation {event.generation} ended in step {event.step}"


def _format_place(data: Mapping[str, Any]) -> str:
    """Return `, in layer 0 (model.layers.0.self_attn, LlamaAttention), at f (a.py:3, "x + y")`."""
    module, layer = data.get("module"), data.get("layer")
    text = "" if layer is None else f", in layer {layer}"
    if module or data.get("class"):
        names = ", ".join(printable(str(one)) for one in (module, data.get("class")) if one)
        text += f" ({names})" if text else f", in {names}"
    frame = format_frame(data)
    return f"{text}, at {frame}" if frame else text


def format_frame(data: Mapping[str, Any]) -> str:
    """Return `f (a.py:3: "x + y")`, the deepest frame of the program; empty if it is not known."""
    frame = data.get("frame")
    if not frame:
        return ""
    where = f"{PurePath(frame['file']).name}:{frame['line']}"
    code = str(frame.get("code", ""))
    code = code if len(code) <= _MAX_CODE else code[: _MAX_CODE - 1] + "…"
    function = str(frame["function"]).replace("<module>", "the top level")
    quoted = f': "{printable(code)}"' if code else ""
    return f"{printable(function)} ({printable(where)}{quoted})"


def format_error(event: EventRecord) -> str:
    """Return the type and the first line of the exception of an event, without a period."""
    return printable(shorten(str(event.data.get("error") or event.text)))


def shorten(error: str) -> str:
    """Return an exception's text, cut, and without a period at its end."""
    first = (error.strip().splitlines() or [""])[0].rstrip(". ")
    return first if len(first) <= _MAX_MESSAGE else first[: _MAX_MESSAGE - 1] + "…"
