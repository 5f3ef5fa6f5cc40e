"""The finding of an exception, from the facts of its event."""

from __future__ import annotations

from typing import Any

import pytest

from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.run_failures import exception_finding, failure_finding

FRAME = {"file": "/home/x/prog.py", "line": 7, "function": "attend", "code": "scores + mask"}


def event(text: str, generation: int | None = 2, step: int | None = 3, **data: Any) -> EventRecord:
    return EventRecord("error", text, 0.0, generation, step, data)


def test_the_sentence_names_the_place_and_the_mask_before_the_exception() -> None:
    facts = {
        "error": "TypeError: unsupported operand\nmore",
        "frame": FRAME,
        "module": "model.layers.1.self_attn",
        "class": "LlamaAttention",
        "layer": 1,
        "mask": "BlockMask of 1 x 1 x 12 x 12",
        "implementation": "eager",
    }
    finding = exception_finding(event("TypeError: unsupported operand", **facts))
    assert finding is not None
    assert (finding.id, finding.severity) == ("run.exception", Severity.ERROR)
    assert (finding.generation, finding.step, finding.layer) == (2, 3, 1)
    assert finding.sentence == (
        "Generation 2 ended in step 3, in layer 1 (model.layers.1.self_attn, LlamaAttention), at "
        'attend (prog.py:7: "scores + mask"). The mask that it received is a BlockMask of '
        "1 x 1 x 12 x 12, which only FlexAttention takes, and these layers run 'eager'. It raised "
        "TypeError: unsupported operand."
    )
    assert "BlockMask is for FlexAttention only" in finding.fix


def test_the_fix_speaks_of_a_mask_only_where_one_was_received() -> None:
    finding = exception_finding(event("ValueError: stop", frame=FRAME))
    assert finding is not None
    assert finding.fix
    assert "BlockMask" not in finding.fix


def test_a_mask_for_flexattention_is_not_blamed() -> None:
    facts = {"mask": "BlockMask of 1 x 1 x 8 x 8", "implementation": "flex_attention"}
    finding = exception_finding(event("IndexError: x", **facts))
    assert finding is not None
    assert "only FlexAttention" not in finding.sentence


@pytest.mark.parametrize("text", ["SystemExit: 1", "KeyboardInterrupt", "asyncio.CancelledError"])
def test_an_exit_is_no_failure(text: str) -> None:
    assert failure_finding(event(text)) is None


def test_memory_that_ran_out_keeps_its_own_finding() -> None:
    error = event("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    finding = failure_finding(error)
    assert finding is not None
    assert finding.id == "memory.exhausted"
    assert exception_finding(error) is None


def test_an_event_without_facts_gives_a_finding_too() -> None:
    finding = exception_finding(event("ValueError: no", None, None), 5)
    assert finding is not None
    assert (finding.generation, finding.step) == (5, None)
    assert finding.sentence == "The program ended. It raised ValueError: no."


def test_an_exception_of_the_program_that_leaves_generate_is_a_note() -> None:
    facts = {"during": "generate", "is_deliberate": True}
    finding = exception_finding(event("Enough", **facts))
    assert finding is not None
    assert finding.severity is Severity.NOTE


def test_a_rule_is_shown_with_what_it_reads_and_gives() -> None:
    rule = {
        "name": "same",
        "kind": "mask_mod",
        "file": "/a/rules.py",
        "line": 4,
        "captured": ["table: int64 tensor (1, 12)"],
        "probes": [
            {"cell": [0, 0], "gives": "bool (12,)"},
            {"cell": [11, 11], "raises": "IndexError: out of bounds"},
        ],
    }
    finding = exception_finding(event("IndexError: out of bounds", rule=rule, frame=FRAME))
    assert finding is not None
    assert finding.id == "mask.rule-raised"
    for words in (
        "It comes from the mask_mod same (rules.py:4), which reads table: int64 tensor (1, 12).",
        "it gives bool (12,), and it must give one bool of shape ().",
        "For 0-dim tensors of row 11 and key 11 it raises IndexError: out of bounds.",
        "The last line of your code is attend (prog.py:7",
    ):
        assert words in finding.sentence
