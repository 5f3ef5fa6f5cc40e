"""The findings of every shipped case name its fault by row, layer, head and step.

One test a case: what a debugger must show its user for the case, and that the correct runs have no
finding. The scripts declare nothing; the declarations are in this file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from support.cases import CASES, COMPILES, found_in_case, ran_case, segments
from support.planting import serious

from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="compiled flex on a CPU needs a C++ compiler",
)

Capture = Callable[..., list[Finding]]


@dataclass(frozen=True)
class Signal:
    """What a finding must name; None where the case names none. `words` are in its sentence."""

    id: str
    severity: str
    words: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    head: int | None = None
    step: int | None = 0
    positions: tuple[int, ...] | None = None


def named(finding: Finding) -> tuple[int, ...]:
    """Return all layers of a finding."""
    alone = () if finding.layer is None else (finding.layer,)
    return finding.layers or alone


def check(found: list[Finding], signal: Signal) -> None:
    """Check that one of the findings is the signal."""
    of_id = [f for f in found if (f.id, str(f.severity)) == (signal.id, signal.severity)]
    fits = [f for f in of_id if all(part in f.sentence for part in signal.words)]
    assert fits, [(finding.id, finding.sentence) for finding in of_id or found]
    finding = fits[0]
    assert finding.step == signal.step
    assert finding.head == signal.head
    if signal.layers is not None:
        assert named(finding) == signal.layers
    if signal.positions is not None:
        assert finding.positions == signal.positions


TWO = segments((1, 7), (9, 15))

DECLARED: dict[str, str] = {
    "w01_bos_shift": TWO,
    "w02_orphan_tokens": TWO,
    "w04_missing_eos": segments((0, 4), (4, 7), (7, 11), label="document"),
    "a01_placeholder_mask": segments((0, 12)),
    "a02_silent_fallback": TWO,
    "a05_patch_needs_a_tensor": segments((0, 4), (4, 8)),
    "s01_leak_through_separators": segments((1, 7), (9, 16)),
    "s03_order_of_paraphrases": segments((0, 5), (5, 10)),
    "o04_drawn_mask_nobody_applied": TWO,
}
"""The declarations of users who name the pieces of their prompt; other cases need none."""

SIGNALS: dict[str, tuple[Signal, ...]] = {
    "w01_bos_shift": (
        Signal(
            *("segments.shifted", "warning"),
            ("1 token early", "without the BOS", "the last token of 'paraphrase 1' (position 6"),
            layers=(0, 1),
            positions=(6, 14),
        ),
        Signal(
            *("mask.empty-row", "warning", ("see no key at all", "first: position 6")),
            layers=(0, 1),
            positions=(6, 7),
        ),
        Signal(
            *("decode.prompt-row-generated", "warning"),
            ("Position 14", "is masked as if generated", "paraphrase 1"),
            layers=(0, 1),
            positions=(14,),
        ),
    ),
    "w02_orphan_tokens": (
        Signal(
            *("mask.empty-row", "warning"),
            ("FlexAttention gives them zeros", "2 other rows (first: position 15) read them"),
            layers=(0, 1, 2),
            positions=(0, 7, 8),
        ),
    ),
    "w04_missing_eos": (
        Signal(
            *("mask.merged", "warning", ("1 block-diagonal piece, but there are 3 segments",)),
            layers=(0, 1),
            positions=(4, 5, 6, 7, 8, 9, 10),
        ),
        Signal(
            *("segments.merged", "warning", ("so no EOS separates them",)),
            layers=(0, 1),
            positions=(4, 7),
        ),
    ),
    "a01_placeholder_mask": (
        Signal(
            *("mask.future", "warning"),
            ("144 of 144 cells open", "a causal mask opens 78", "rows 0-10 see the future"),
            layers=(0, 1),
            positions=tuple(range(11)),
        ),
    ),
    "a02_silent_fallback": (
        Signal(
            *("path.fallback", "error"),
            ("Layer 1 (of 2 layers) fell back to sdpa in step 0", "RuntimeError: the flex call"),
            layers=(1,),
        ),
    ),
    "a05_patch_needs_a_tensor": (
        Signal(
            *("mask.not-applied", "warning"),
            (
                "All 2 layers ran causal SDPA without a mask (received: None, backend sdpa)",
                "was applied in 0 of 2 layers: paraphrase 2 sees paraphrase 1",
            ),
            layers=(0, 1),
            positions=(4, 5, 6, 7),
        ),
    ),
    "a07_no_mask_function": (
        Signal(
            *("mask.none", "error"),
            ("attention 'mine' has no mask function", "rows 0-8 see the future"),
            layers=(0, 1),
            positions=tuple(range(9)),
        ),
    ),
    "a09_bool_mask_is_added": (
        Signal(
            *("mask.bool-added", "error"),
            ("eager attention with a bool mask", "adds 1 to the scores", "closes nothing"),
            layers=(0, 1),
            positions=tuple(range(9)),
        ),
        Signal(
            *("mask.bool-added", "error", ("FlexAttention with a bool mask",)),
            layers=(0, 1),
        ),
    ),
    "s01_leak_through_separators": (
        Signal(
            *("reach.leak", "warning"),
            ("Paraphrase 2 depends on paraphrase 1 from layer 1 on, through rows 7", "separator 1"),
            layers=(1,),
            positions=(7, 8),
        ),
    ),
    "s03_order_of_paraphrases": (
        Signal(
            *("positions.not-reset", "note", ("not restarted at paraphrase 2: it begins at 5",)),
            positions=(5,),
        ),
    ),
    "s04_left_padding": (
        Signal(
            *("mask.empty-row", "note", ("3 rows of padding", "the mean of all values")),
            positions=(0, 1, 2),
        ),
        Signal(
            *("same-prompt.same", "note"),
            ("rows 0-2 are padding: differences there are expected and not counted",),
            positions=(0, 1, 2),
        ),
    ),
    "k01_decode_without_offset": (
        Signal(
            *("decode.no-offset", "error"),
            ("the rows of step 1 from 0", "sees 1 of 10 keys in all 2 layers; 10 expected"),
            layers=(0, 1),
            step=1,
            positions=(9,),
        ),
    ),
    "k03_empty_cache_slots": (
        Signal(
            *("cache.empty-slots", "error"),
            ("32 keys open, 12 filled: 54 % of the attention",),
        ),
    ),
    "k04_mask_one_short": (
        Signal(
            *("lengths.mask-kv", "error"),
            ("KV length 33 but mask built for 32", "(layer 0, step 1; cache holds 32 before, 33"),
            layers=(0,),
            step=1,
        ),
    ),
    "k07_lost_cache": (
        Signal(
            *("cache.empty-layer", "error"),
            ("Layer 0 received a cache and left it empty (0), layer 1 holds 5",),
            layers=(0,),
        ),
    ),
    "k09_no_cache": (
        Signal(
            *("path.needless-builds", "note", ("The same mask was built 4 times in step 0",)),
            layers=(0, 1, 2, 3),
        ),
        Signal(
            *("cache.not-used", "note"),
            ("q length grows 10, 11, 12, ...", "60 query rows, where 14 are enough"),
            step=1,
        ),
    ),
    "b02_stale_tables": (
        Signal(
            *("mask.stale-tables", "error"),
            ("2 open blocks missing, first: rows 128-255, keys 0-127",),
            positions=(128,),
        ),
    ),
    "b06_blocks_for_tokens": (
        Signal(
            *("mask.block-view", "note"),
            ("40 x 40 cells, 820 of them open, fits into one block of 128 x 128",),
        ),
    ),
    "p02_graph_every_step": (
        Signal(
            *("graphs.every-step", "warning"),
            ("5 new graphs in 5 calls", "guard: mask_mod code object", "is new code each time"),
        ),
    ),
    "p03_square_of_the_length": (
        Signal(
            *("memory.mask-creation", "warning"),
            ("Building a block mask sets the memory peak", "1 x 8 x 2048 x 2048", "H can be"),
        ),
    ),
    "n01_which_head": (
        Signal(
            *("mask.by-head", "note", ("query head 3 -> kv head 1",)),
            head=3,
        ),
    ),
    "n02_bfloat16": (
        Signal(
            *("same-prompt.rounding", "note"),
            ("bfloat16", "float32", "no layer adds far more", "margin"),
        ),
    ),
    "l01_compiled_does_not_build": (
        Signal(
            *("kernel.does-not-build", "error"),
            ("does not build in layer 0, step 1", "InductorError"),
            layers=(0,),
            step=1,
        ),
    ),
    "o01_not_weights": (
        Signal(
            *("observer.not-weights", "warning"),
            ("(1, 14, 32), whose rows do not sum to 1; weights would be (1, 4, 14, 14)",),
            layers=(0,),
        ),
    ),
    "o03_logger_breaks_flex": (
        Signal(
            *("observer.logger-breaks-flex", "warning"),
            ("NotImplementedError", "dispatch mode", "__main__.Log"),
            step=None,
        ),
    ),
    "o04_drawn_mask_nobody_applied": (
        Signal(
            *("mask.not-applied", "warning"),
            ("All 2 layers ran causal SDPA without a mask", "paraphrase 2 sees paraphrase 1"),
            layers=(0, 1),
            positions=tuple(range(9, 15)),
        ),
    ),
}
"""The findings by case; `l01_compiled_crash` has a separate test, as its process dies."""


@pytest.fixture
def found() -> Capture:
    return found_in_case


def cases(names: list[str]) -> list[object]:
    slow = (pytest.mark.slow, needs_compiler)
    return [pytest.param(name, marks=slow if name in COMPILES else ()) for name in names]


@pytest.mark.parametrize("name", cases([*SIGNALS]))
def test_the_finding_of_a_case_names_where_it_goes_wrong(name: str, found: Capture) -> None:
    findings = found(name, DECLARED.get(name, ""))
    for signal in SIGNALS[name]:
        check(findings, signal)


@pytest.mark.slow
@needs_compiler
def test_a_crash_is_reported_with_the_call_that_did_not_return() -> None:
    ran, out = ran_case("l01_compiled_crash")
    assert ran.code != 0
    with open_trace(out) as reader:
        (finding,) = [one for one in reader.findings() if one.id == "observer.crash"]
    assert finding.severity is Severity.ERROR
    assert "entered flex (compiled, score_mod with captured tensor)" in finding.sentence
    assert "which did not return" in finding.sentence


CONTROLS = (
    "c1_plain_causal_prompt",
    "c2_padded_batch",
    "c3_open_decode_row",
    "c4_two_graphs",
    "c5_shifted_positions",
    "c6_shared_mask",
    "n02_bfloat16",
)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_correct_run_has_no_error_and_no_warning(name: str, found: Capture) -> None:
    assert [finding.sentence for finding in serious(found(name))] == []


def test_nan_in_closed_keys_is_harmless_and_in_closed_values_is_not(found: Capture) -> None:
    (finding,) = serious(found("c7_nan_in_masked_keys"))
    assert (finding.generation, finding.id) == (1, "numbers.nan")


def test_every_case_has_its_signal() -> None:
    correct = {path.stem for path in CASES.glob("c[0-9]_*.py")}
    every = {path.stem for path in CASES.glob("[a-z][0-9][0-9]_*.py")}
    assert every - correct == {*SIGNALS, "l01_compiled_crash"}
