"""The benchmark of growth runs in a small form; its figures are counted, its times only read."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import growth


@pytest.fixture(scope="module")
def parts() -> list[growth.Part]:
    return growth.run_parts(growth.generate_steps, 40, "basic")


def test_each_part_of_a_run_has_its_cost(parts: list[growth.Part]) -> None:
    assert [part.steps for part in parts] == [4 * number for number in range(1, 11)]
    assert all(part.rss > 0 for part in parts)
    assert sum(part.bytes_per_step for part in parts) > 0


def test_a_second_answer_is_another_generation_of_the_same_trace() -> None:
    model = growth.small_model(1)
    assert list(growth.answer_prompts(model, 2)) == [0, 1]
    assert list(growth.generate_steps(model, 3)) == [0, 1, 2]


def test_the_record_of_a_mask_grows_with_its_blocks_and_not_with_its_cells() -> None:
    short, long = growth.by_prompt_length((1024, 4096)).values()
    assert long["cells"] > 15 * short["cells"]
    assert long["bytes"] < 1.5 * short["bytes"] * long["blocks"] / short["blocks"]


def test_the_tables_have_a_row_for_each_part(parts: list[growth.Part]) -> None:
    from msgspec import to_builtins

    facts: dict[str, Any] = {"parts": to_builtins(parts), **growth._last_to_second(parts)}
    layers = {"2": {"capture_ms": 1.0, "bytes_per_step": 3000}}
    masks = {"512": {"cells": 1, "blocks": 1, "bytes": 1}}
    text = growth.table({"steps": facts, "answers": facts, "layers": layers, "masks": masks})
    assert text.count("\n| 40 |") == 2
    assert "| 2 | 1.00 | 3,000 |" in text
