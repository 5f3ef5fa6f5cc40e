"""Memory that attention does not explain is reported with its numbers; correct runs are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.cases import found_in_case
from support.paths import TESTS
from support.planting import of, one, serious
from support.warm_python import run_warm

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import (
    ArrayRecord,
    BuildRecord,
    GenerationRecord,
    MemoryRecord,
    StepRecord,
)
from flexinspect.rules.context import RuleContext
from flexinspect.rules.numerics import memory_growth
from flexinspect.rules.numerics.memory_growth import MIB, MemoryRule
from flexinspect.trace.reader import open_trace

N = 60


def step(number: int, rss: int = 0, **changes: Any) -> StepRecord:
    memory = MemoryRecord(1000 * MIB + rss, MIB, number * 1000)
    times = (0.0, 10.0, 0.1)
    phase = "decode" if number else "prefill"
    made = StepRecord(0, number, phase, 1 if number else 9, number, number + 1, *times)
    return replace(made, memory=memory, **changes)


def look(*steps: StepRecord, standalone: bool = False) -> list[Finding]:
    context, rule = RuleContext(), MemoryRule()
    context.start_generation(GenerationRecord(0, "s", "m", "c", (), ()), is_standalone=standalone)
    rule.on_generation_start(context)
    found: list[Finding] = []
    for record in steps:
        context.add_step(record)
        found += rule.on_step(record)
    return [*found, *rule.on_generation_end()]


def build(
    growth: int, heads: int | None = None, n: int = 4096, mask_mod: str = "rule"
) -> BuildRecord:
    return BuildRecord(None, None, heads, n, n, mask_mod, 80.0, growth * MIB)


def curve(of_step: Callable[[int], float], n: int = N) -> list[Finding]:
    return look(step(0), *(step(i, int(of_step(i) * MIB)) for i in range(1, n)))


# -- building masks --------------------------------------------------------------------------------


def test_a_peak_in_the_making_of_a_mask_is_a_note() -> None:
    found = one(look(step(0, builds=(build(160),))), "memory.mask-creation")
    assert found.severity is Severity.NOTE
    assert found.sentence == (
        "Building a block mask sets the memory peak of step 0, not attention: 160 MiB for "
        "the grid 1 x 1 x 4096 x 4096 in 80 ms (mask_mod rule)."
    )


def test_heads_for_a_mask_mod_that_is_built_without_them_as_well_are_a_warning() -> None:
    found = one(look(step(0, builds=(build(9, n=256), build(1168, 8)))), "memory.mask-creation")
    assert found.severity is Severity.WARNING
    assert found.sentence.endswith("; H can be None because the mask_mod ignores the head.")


def test_heads_that_may_be_needed_are_a_note_with_the_question() -> None:
    found = one(look(step(0, builds=(build(300, 8),))), "memory.mask-creation")
    assert found.severity is Severity.NOTE
    assert "H can be None if the mask_mod ignores the head" in found.sentence


def test_a_gibibyte_is_too_much_whatever_the_reason() -> None:
    found = one(look(step(0, builds=(build(2600, n=16384),))), "memory.mask-creation")
    assert found.severity is Severity.WARNING


def test_compile_time_is_not_counted_for_the_grid() -> None:
    assert look(step(0, builds=(build(101, n=8),))) == []


def test_small_masks_and_smaller_ones_after_the_peak_are_not_reported() -> None:
    assert look(step(0, builds=(build(40),)), step(1, builds=(build(90),))) == []
    again = look(step(0, builds=(build(200),)), step(1, builds=(build(150),)))
    assert len(of(again, "memory.mask-creation")) == 1


BEGINNING = """
import sys, torch, flexinspect
from support.patches import Own
from support.tiny import ids, make_model

def watched(model, run, name):
    with flexinspect.watch(model, out=f"{sys.argv[1]}/{name}.flextrace", level=sys.argv[2]):
        run()
"""


def run_fresh(tmp_path: Path, code: str, level: str = "advanced") -> None:
    """Run code in a new process: in ours the peak and the free memory hide all growth."""
    file, tests = tmp_path / "code.py", TESTS
    file.write_text(f"import sys; sys.path.insert(0, {str(tests)!r})\n{BEGINNING}{code}")
    ran = run_warm([str(file), str(tmp_path), level])
    assert ran.code == 0, ran


def findings_in(path: Path) -> list[Finding]:
    with open_trace(path) as reader:
        return reader.findings()


LONG = """
model = make_model("llama", max_position_embeddings=4096, num_attention_heads=8)
Own(model, heads=8)
input_ids = torch.tensor([ids(1800, 1)])
watched(model, lambda: model(input_ids, use_cache=False), "long")
"""


def test_a_long_prompt_with_a_mask_for_every_head(tmp_path: Path) -> None:
    run_fresh(tmp_path, LONG, "basic")
    found = findings_in(tmp_path / "long.flextrace")
    assert one(found, "memory.mask-creation").evidence["grid"] == [1, 8, 1800, 1800]


# -- growth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grows",
    [
        pytest.param(lambda i: 4 * i, id="evenly"),
        pytest.param(lambda i: 4 * i + 3 * (i % 2), id="with a wobble"),
        pytest.param(lambda i: 20 * (i // 5), id="in jumps of five steps"),
        pytest.param(lambda i: 300 + 6 * i, id="after a high start"),
        pytest.param(lambda i: 0.1 * i * i, id="faster and faster"),
    ],
)
def test_steady_growth_is_reported_once_at_the_end(grows: Callable[[int], float]) -> None:
    (found,) = curve(grows)
    assert (found.id, found.severity) == ("memory.growth", Severity.NOTE)
    assert found.evidence["per_step"] >= 2 * MIB


def test_the_growth_is_counted() -> None:
    (found,) = curve(lambda i: 4 * i)
    assert found.sentence == (
        "Memory beyond the KV cache grew by 4.0 MiB per step, 176 MiB from step 15 to 59."
    )


@pytest.mark.parametrize(
    "grows",
    [
        pytest.param(lambda i: 0, id="flat"),
        pytest.param(lambda i: 400 * (i > 5), id="one jump in the beginning"),
        pytest.param(lambda i: 400 * (i > 40), id="one jump late"),
        pytest.param(lambda i: 0.2 * i, id="a little"),
        pytest.param(lambda i: 90 * (i % 7), id="up and down"),
        pytest.param(lambda i: -5 * i, id="down"),
    ],
)
def test_memory_that_does_not_grow_steadily_is_not_reported(grows: Callable[[int], float]) -> None:
    assert curve(grows) == []


def test_growth_of_a_long_generation_is_judged_from_few_of_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_growth, "MAX_VALUES", 40)
    kept: list[int] = []
    judge = memory_growth.steady_growth

    def counted(values: Sequence[int], every: int = 1) -> Any:
        kept.append(len(values))
        return judge(values, every)

    monkeypatch.setattr(memory_growth, "steady_growth", counted)
    (found,) = curve(lambda i: 4 * i, n=1000)
    assert "grew by 4.0 MiB per step" in found.sentence
    assert kept[0] <= 40


def test_a_few_steps_give_no_finding() -> None:
    assert curve(lambda i: 50 * i, n=12) == []


LOOP = """
def loop(model, kept):
    cache, input_ids = None, torch.tensor([ids(9, 1)])
    for _ in range(30):
        out = model(input_ids, past_key_values=cache)
        cache, input_ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        if kept is not None:
            kept.append(torch.ones(8 << 18))  # 8 MiB

model = make_model("llama")
watched(model, lambda: loop(model, None), "clean")
watched(model, lambda: loop(model, []), "growing")
"""


def test_a_loop_that_keeps_what_each_step_made(tmp_path: Path) -> None:
    run_fresh(tmp_path, LOOP)
    found = one(findings_in(tmp_path / "growing.flextrace"), "memory.growth")
    assert found.evidence["per_step"] > 6 * MIB
    assert of(findings_in(tmp_path / "clean.flextrace"), "memory.growth") == []


# -- our own share ---------------------------------------------------------------------------------


def test_large_captured_data_is_reported() -> None:
    large = ArrayRecord("hidden", np.broadcast_to(np.zeros(1, np.float32), (100, 1 << 20)))
    (found,) = look(step(0, arrays=(large,)))
    assert (found.id, found.severity) == ("memory.capture", Severity.NOTE)
    assert "Capture recorded 400 MiB of step 0 (1 array), 40% of the 1000 MiB" in found.sentence
    small = ArrayRecord("hidden", np.zeros((100, 100), np.float32))
    assert look(step(0, arrays=(small,))) == []


# -- the cases -------------------------------------------------------------------------------------


def test_the_square_of_the_length() -> None:
    found = found_in_case("p03_square_of_the_length")
    peak = one(found, "memory.mask-creation")
    assert peak.severity is Severity.WARNING
    assert peak.evidence["grid"] == [1, 8, 2048, 2048]
    assert "H can be None" in peak.sentence
    assert serious(found) == [peak]
