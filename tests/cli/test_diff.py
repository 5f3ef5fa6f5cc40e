"""`flexinspect diff`: what differs between two traces, what is noise, and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from support.traces import LAYERS, RUN, SEGMENTS, sample_generation, sample_step

from flexinspect.cli.main import main
from flexinspect.records.step import ArrayRecord, GenerationEnd, StepRecord
from flexinspect.rules.step_diff import (
    LayerDifference,
    MaskDifference,
    RunDifference,
    StepDifference,
    find_jump,
)
from flexinspect.trace.file.writer import TraceWriter

STEPS = 4


def write(path: Path, *steps: StepRecord, prompt: Any = None) -> Path:
    """Write a trace of one generation with these steps."""
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(sample_generation(0) if prompt is None else prompt)
        for step in steps:
            writer.write_step(step)
        writer.end_generation(GenerationEnd(0, "finished", "", SEGMENTS, "eos", 1010.0))
    return path


def clean() -> list[StepRecord]:
    return [sample_step(step, 0, nan_at=None) for step in range(STEPS)]


def scaled(step: StepRecord, layer: int, by: float) -> StepRecord:
    """Return a step whose layer is larger by a share, in all that is recorded of it."""
    stats = tuple(
        replace(one, norm=one.norm * by, std=one.std * by, min=one.min * by, max=one.max * by)
        if one.layer == layer
        else one
        for one in step.layer_stats
    )
    return replace(step, layer_stats=stats)


def masked(step: StepRecord, cells: npt.NDArray[np.bool_]) -> StepRecord:
    """Return a step whose first mask has other cells, and a fingerprint of them."""
    old = step.masks[0]
    new = replace(old, fingerprint=f"cells {hash(cells.tobytes())}", cells=cells)
    calls = tuple(
        replace(call, mask=new.fingerprint) if call.mask == old.fingerprint else call
        for call in step.calls
    )
    masks = tuple(new if one is old else one for one in step.masks)
    return replace(step, masks=masks, calls=calls)


def compared(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    code = main(["diff", *map(str, args)])
    return code, capsys.readouterr().out


def test_a_trace_and_its_copy_are_reported_as_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    b = Path(shutil.copy(a, tmp_path / "b.flextrace"))
    code, out = compared(capsys, a, b)
    assert code == 0
    assert "Identical files: byte for byte the same" in out
    assert "4 steps compared: the same" in out


def test_two_runs_of_one_kind_are_the_same_though_their_files_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    late = [replace(step, wall_ms=99.0) for step in clean()]
    code, out = compared(capsys, a, write(tmp_path / "b.flextrace", *late), "--json")
    report = json.loads(out)
    assert (code, report["verdict"], report["identical"]) == (0, "same", False)
    assert report["generations"][0]["first_difference"] is None


def test_a_layer_that_jumps_is_named_with_what_it_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    steps = clean()
    for layer in range(2, LAYERS):
        steps[1] = scaled(steps[1], layer, 1.5)
    b = write(tmp_path / "b.flextrace", *steps)
    code, out = compared(capsys, a, b, "--json")
    (generation,) = json.loads(out)["generations"]
    assert (code, generation["verdict"], generation["jump"]) == (1, "different", 2)
    assert generation["first_difference"] == 1
    layers = generation["steps"][1]["layers"]
    assert [one["added"] > 0.1 for one in layers] == [False, False, True, False]
    assert "layer 2 stands out" in compared(capsys, a, b)[1]


def test_rounding_counts_only_when_exactness_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    steps = [scaled(step, 1, 1.000001) for step in clean()]
    b = write(tmp_path / "b.flextrace", *steps)
    code, out = compared(capsys, a, b)
    assert code == 0
    assert "The same within noise: no difference is larger than rounding explains." in out
    assert "first difference: step 0, layer 1: hidden by 1e-06" in out
    code, out = compared(capsys, a, b, "--exact")
    assert (code, out.splitlines()[-1]) == (1, "With --exact, that is a difference.")


def test_where_tokens_differ_both_margins_are_printed_and_nothing_after_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = clean()
    logits = steps[1].logits
    assert logits is not None
    other = logits.candidates[1].token_id
    steps[1] = replace(steps[1], logits=replace(logits, chosen_id=other, chosen_rank=1, margin=0.5))
    steps[2] = scaled(steps[2], 0, 3.0)
    a = write(tmp_path / "a.flextrace", *clean())
    b = write(tmp_path / "b.flextrace", *steps)
    code, out = compared(capsys, a, b, "--json")
    (generation,) = json.loads(out)["generations"]
    assert (code, generation["parted_at"], len(generation["steps"])) == (1, 1, 2)
    assert generation["steps"][1]["margins"][1] == 0.5
    assert "from step 2 on the two receive different tokens" in compared(capsys, a, b)[1]


def test_other_prompts_are_named_at_the_position_where_they_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    record = sample_generation(0)
    tokens = list(record.tokens)
    tokens[3] = replace(tokens[3], token_id=999, text=" Ulysses")
    prompt = replace(record, tokens=tuple(tokens))
    code, out = compared(capsys, a, write(tmp_path / "b.flextrace", *clean(), prompt=prompt))
    assert code == 1
    assert "the prompts differ from position 3 on: ' Emma' against ' Ulysses'" in out


def test_masks_that_differ_are_counted_and_placed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = clean()[0].masks[0]
    assert mask.cells is not None
    cells = mask.cells.copy()
    cells[:, 7, 2] = ~cells[:, 7, 2]
    a = write(tmp_path / "a.flextrace", clean()[0])
    code, out = compared(capsys, a, write(tmp_path / "b.flextrace", masked(clean()[0], cells)))
    assert code == 1
    opens, closes = "AB" if mask.cells[0, 7, 2] else "BA"
    first = 'first: "\'s" (7) sees " wrote" (2)'
    assert f"    {opens} opens 1 cell that {closes} closes (layers 0-3); {first}" in out


@pytest.mark.parametrize("n_heads", [2, 3])
def test_a_mask_of_each_head_is_compared_with_one_that_all_share(
    n_heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = clean()[0].masks[0]
    assert mask.cells is not None
    shared = mask.cells[:1]
    cells = np.repeat(shared, n_heads, 0)
    cells[1, 7, 2] = ~cells[1, 7, 2]
    a = write(tmp_path / "a.flextrace", masked(clean()[0], shared))
    code, out = compared(capsys, a, write(tmp_path / "b.flextrace", masked(clean()[0], cells)))
    assert code == 1
    assert " opens 1 cell that " in out


def test_masks_of_other_numbers_of_heads_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = clean()[0].masks[0]
    assert mask.cells is not None
    two, three = (masked(clean()[0], np.repeat(mask.cells[:1], n, 0)) for n in (2, 3))
    a = write(tmp_path / "a.flextrace", two)
    code, out = compared(capsys, a, write(tmp_path / "b.flextrace", three))
    assert code == 1
    assert "masks of layers 0-3 differ" in out


def test_hidden_states_go_before_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ones = np.ones((1, 8), np.float32)
    one, two = (
        replace(clean()[1], arrays=(ArrayRecord("hidden", ones * by, 0),)) for by in (1.0, 1.25)
    )
    a = write(tmp_path / "a.flextrace", clean()[0], one)
    b = write(tmp_path / "b.flextrace", clean()[0], two)
    (layer,) = json.loads(compared(capsys, a, b, "--json")[1])["generations"][0]["steps"][1][
        "layers"
    ]
    assert (layer["difference"], layer["exact"]) == (0.25, True)


def test_steps_with_the_numbers_of_the_step_before_are_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = clean()
    frozen = [replace(step, layer_stats=steps[1].layer_stats) for step in steps]
    a = write(tmp_path / "a.flextrace", *steps)
    out = compared(capsys, a, write(tmp_path / "b.flextrace", *frozen))[1]
    assert "B: steps 1-3 hold the numbers of the step before (stale)" in out


def test_no_layer_stands_out_where_all_masks_differ() -> None:
    layers = tuple(LayerDifference(n, 0.5, 0.5 if n == 0 else 0.0) for n in range(4))
    step = StepDifference(0, layers=layers)
    assert RunDifference((step,), 0.001).jump == 0
    some, every = (replace(step, masks=(MaskDifference(own),)) for own in ((0, 1), (0, 1, 2, 3)))
    assert RunDifference((some,), 0.001).jump == 0
    assert RunDifference((every,), 0.001).jump is None


def test_a_training_and_a_generation_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    training = replace(sample_generation(0), tokens=(), declared={"training": {}})
    b = write(tmp_path / "b.flextrace", prompt=training)
    for pair, sentence in (
        ((a, b), "A is a generation and B a training"),
        ((b, a), "A is a training and B a generation"),
    ):
        assert main(["diff", *map(str, pair)]) == 2
        assert f"{sentence}, so they cannot be compared." in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    assert main(["diff", str(a), str(tmp_path / "none.flextrace")]) == 2
    assert main(["diff", str(a), str(a), "--generation", "7"]) == 2
    assert "has a generation 7" in capsys.readouterr().err


def test_even_growth_is_no_jump() -> None:
    even = [LayerDifference(n, 0.01 * (n + 1), 0.01) for n in range(8)]
    assert find_jump(even, 0.001) is None
    step = [LayerDifference(n, 0.5 if n >= 3 else 0.0, 0.5 if n == 3 else 0.0) for n in range(8)]
    jump = find_jump(step, 0.001)
    assert jump is not None
    assert jump.layer == 3


def test_compare_is_another_name_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    assert main(["compare", str(a), str(a)]) == 0
    assert "byte for byte the same" in capsys.readouterr().out


def test_the_report_says_what_was_compared_and_what_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    ones = ArrayRecord("hidden", np.ones((1, 8), np.float32), 0)
    extreme = [replace(step, arrays=(*step.arrays, ones)) for step in clean()]
    code, out = compared(capsys, a, write(tmp_path / "b.flextrace", *extreme))
    assert code == 0
    assert "No difference in anything that was compared." in out
    assert "hidden         16  0; 16 from statistics or candidates" in out
    assert "not compared: q, k, v (recorded in neither run)" in out


def test_the_json_names_its_version_and_the_first_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    steps = clean()
    steps[2] = scaled(steps[2], 3, 1.5)
    report = json.loads(compared(capsys, a, write(tmp_path / "b.flextrace", *steps), "--json")[1])
    first = report["generations"][0]["first"]
    assert report["version"] == 2
    assert [first[key] for key in ("step", "layer", "quantity", "reason")] == [
        *(2, 3, "hidden", "value")
    ]
    assert first["before"] == ["mask", "scores", "attention"]


def test_a_repeat_of_a_that_is_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    record = sample_generation(0)
    tokens = (replace(record.tokens[0], token_id=999), *record.tokens[1:])
    other = write(tmp_path / "b.flextrace", *clean(), prompt=replace(record, tokens=tokens))
    assert main(["diff", str(a), str(a), "--noise", str(other)]) == 2
    assert "repeats none of the compared generations" in capsys.readouterr().err


def test_a_itself_is_no_repeat_of_a(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.flextrace", *clean())
    b = write(tmp_path / "b.flextrace", *(scaled(step, 1, 1.000001) for step in clean()))
    assert main(["diff", str(a), str(b), "--noise", str(a)]) == 2
    assert "is A itself, which shows no noise" in capsys.readouterr().err
