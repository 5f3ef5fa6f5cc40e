"""Findings are in the trace as soon as the step is, from real runs of real models."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.patience import PATIENCE_S
from support.tiny import make_model
from torch import Tensor

from flexinspect.core import plugins
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.datasets import load as load_samples
from flexinspect.masks import mask_presets
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.job import Job
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import GenerationEnd, GenerationRecord, StepRecord, TokenRecord
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.capture.hook import built_in_rules
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.generation.decoding import Choice, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource, SpecMaskSource, UserMaskSource
from flexinspect_hooks.loading.model_loader import load
from flexinspect_hooks.sessions.capture_session import CaptureSession

CPU = torch.device("cpu")
NEW = 6
AFTER_THE_SCORES = (
    "; the scores of that row are finite, so it comes from the values or a later part"
)


def record_run(
    model: Any,
    prompt: Prompt,
    out: Path,
    *,
    level: str = "advanced",
    source: MaskSource | None = None,
    declared: Mapping[str, Any] | None = None,
    rules: Sequence[Rule] | None = None,
    backend: str | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> list[str]:
    """Generate into a trace; returns the texts of events "rule-disabled"."""
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    source = source or SpecMaskSource(spec, length=128, device=CPU, compiled=False)
    record = GenerationRecord(
        0, "s", source.name, "contiguous", prompt.segments, _tokens(prompt), (), declared or {}
    )

    def chose(choice: Choice) -> None:
        pos = len(prompt.ids) + choice.step
        text = f"w{choice.step}"
        session.on_token_chosen(
            TokenRecord(pos, choice.token_id, text, text, pos, 8, step=choice.step),
            choice.scores,
        )
        on_step(choice.step)

    with TraceWriter.create(out, {}) as writer:
        session = CaptureSession(model, writer, level=level, rules=rules)
        with session:
            session.begin_generation(record)
            if backend is None:
                with FlexPatch(model, source, compiled=False):
                    generate(model, prompt, max_new_tokens=NEW, on_choice=chose)
            else:
                model.set_attn_implementation(backend)
                generate(model, prompt, max_new_tokens=NEW, on_choice=chose)
            session.end_generation(GenerationEnd(0, "finished", "", prompt.segments))
    with open_trace(out) as reader:
        return [row.event.text for row in reader.events() if row.event.kind == "rule-disabled"]


def _tokens(prompt: Prompt) -> tuple[TokenRecord, ...]:
    return tuple(
        TokenRecord(pos, i, f"t{pos}", f"t{pos}", pos, 0) for pos, i in enumerate(prompt.ids)
    )


def findings_of(path: Path) -> list[Finding]:
    with open_trace(path) as reader:
        return reader.findings()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "t.flextrace"


# -- correct runs ----------------------------------------------------------------------------------


def run_demo(out: Path, **options: Any) -> list[Finding]:
    """Run the demo model over two samples as the capture process does."""
    job = Job(out=str(out), max_samples=2, max_new_tokens=8, **options)
    loaded = load(model_names.resolve("demo", load_config()), device="cpu", dtype="auto")
    ensemble = EnsembleRunner(loaded, job, compiled=False)
    with TraceWriter.create(out, {}) as writer:
        session = CaptureSession(loaded.model, writer, level=job.level, copy_logits=False)
        with session:
            for number, sample in enumerate(load_samples("demo", max_samples=2)):
                ensemble.run(number, ensemble.plan(sample), session)
    return findings_of(out)


@pytest.mark.parametrize("level", ["basic", "advanced", "extreme"])
def test_a_correct_run_of_the_demo_has_no_findings(out: Path, level: str) -> None:
    assert run_demo(out, level=level) == []
    with open_trace(out) as reader:
        assert all(reader.n_steps(row.generation) >= 2 for row in reader.generations())


@pytest.mark.parametrize("mask", sorted(mask_presets.PRESETS))
def test_no_preset_causes_a_finding_on_the_demo(out: Path, mask: str) -> None:
    assert run_demo(out, mask=mask) == []


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "eager")],
)
def test_other_backends_and_sliding_windows_cause_no_finding(
    prompt: Prompt, out: Path, family: str, backend: str
) -> None:
    declared = {"preset": "causal", "starts": [0], "prefix_stops": [0], "local_starts": [0]}
    run = record_run(make_model(family), prompt, out, backend=backend, declared=declared)
    assert run == []
    assert findings_of(out) == []


def test_isolated_separators_are_a_note_in_each_generation(out: Path) -> None:
    found = run_demo(out, separators="isolated")
    assert [(f.generation, f.step, f.severity) for f in found] == [
        (0, 0, Severity.NOTE),
        (1, 0, Severity.NOTE),
    ]
    with open_trace(out) as reader:
        for finding in found:
            separators = [s for s in reader.segments(finding.generation) if s.kind == "separator"]
            assert finding.positions == tuple(s.start for s in separators)
    assert "as --separators isolated requires" in found[0].sentence
    assert "other row" in found[0].sentence


# -- NaN and Inf -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["basic", "advanced", "extreme"])
def test_nan_in_a_layers_weights_names_that_layer_once(
    llama: Any, prompt: Prompt, out: Path, level: str
) -> None:
    llama.model.layers[2].mlp.down_proj.weight.data[3, 3] = torch.nan
    record_run(llama, prompt, out, level=level)
    (finding,) = findings_of(out)
    assert (finding.id, finding.severity) == ("numbers.nan", Severity.ERROR)
    assert (finding.step, finding.layer, finding.evidence["in_logits"]) == (0, 2, True)
    assert "layer 2 (model.layers.2)" in finding.sentence
    known = tuple(range(len(prompt.ids)))[:32] if level == "extreme" else (0,)
    assert finding.positions == known


@pytest.fixture
def inf_at_step_3(llama: Any) -> Iterator[Any]:
    """A model whose layer 1 has one Inf in its output in step 3 only."""
    calls = []

    def corrupt(module: Any, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            output = output.clone()
            output[0, -1, 7] = torch.inf
        return output

    handle = llama.model.layers[1].register_forward_hook(corrupt)
    yield llama
    handle.remove()


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_an_inf_is_reported_in_its_step_and_not_in_later_ones_that_read_the_cache(
    inf_at_step_3: Any, prompt: Prompt, out: Path, level: str
) -> None:
    record_run(inf_at_step_3, prompt, out, level=level)
    (finding,) = findings_of(out)
    assert (finding.id, finding.step, finding.layer) == ("numbers.inf", 3, 1)
    at = len(prompt.ids) + 2
    assert finding.positions == (at,)
    assert finding.sentence == (
        "Inf first appears in the output of layer 1 (model.layers.1), in step 3 at position "
        f'{at} "w2": 1 value; layer 2 and the logits contain it too'
        f"{AFTER_THE_SCORES if level == 'advanced' else ''}."
    )
    with open_trace(out) as reader:
        assert [f.id for f in reader.findings(generation=0, step=3)] == ["numbers.inf"]
        stats = {s.layer for s in reader.layer_stats(0, 5) if s.n_nan or s.n_inf}
    assert stats == {2}  # the cache keeps it alive one layer further down


def test_nan_in_the_lm_head_is_reported_for_the_logits(
    llama: Any, prompt: Prompt, out: Path
) -> None:
    llama.lm_head.weight.data[17] = torch.nan
    record_run(llama, prompt, out)
    (finding,) = findings_of(out)
    assert (finding.id, finding.step, finding.layer) == ("numbers.nan", 0, None)
    assert finding.evidence == {"module": "logits", "n_nan": 1, "n_inf": 0}
    assert "every layer's output is finite" in finding.sentence


def test_a_model_that_masks_tokens_by_design_causes_no_finding(
    llama: Any, prompt: Prompt, out: Path
) -> None:
    def close(module: Any, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[..., 290:] = -torch.inf
        return output

    handle = llama.lm_head.register_forward_hook(close)
    record_run(llama, prompt, out)
    handle.remove()
    with open_trace(out) as reader:
        record = reader.logits(0, 2)
        assert record is not None
        assert record.n_inf == 10
        assert reader.findings() == []


# -- empty rows ------------------------------------------------------------------------------------


def test_a_user_mask_with_empty_rows_is_a_warning_with_their_tokens(
    llama: Any, prompt: Prompt, out: Path
) -> None:
    second = next(s for s in prompt.segments if s.label == "paraphrase 2")
    first, stop = second.start + 1, second.stop

    def hole(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & ~((q_idx >= first) & (q_idx < stop))

    declared = {"preset": "causal", "starts": [0], "prefix_stops": [0], "local_starts": [0]}
    own = UserMaskSource(hole, name="hole", device=CPU)
    record_run(llama, prompt, out, source=own, declared=declared)
    (finding,) = findings_of(out)
    n_readers = len(prompt.ids) - stop
    assert (finding.id, finding.severity, finding.step) == ("mask.empty-row", Severity.WARNING, 0)
    assert finding.positions == tuple(range(first, stop))
    assert finding.sentence == (
        f'4 rows of paraphrase 2 see no key at all (first: position {first} "t{first}"); '
        "FlexAttention gives them zeros (a dense softmax would give NaN), and "
        f"{n_readers} other rows (first: position {stop}) read them."
    )
    assert finding.evidence["layers"] == [0, 1, 2]


def test_the_attention_of_an_empty_row_is_zero_as_the_finding_states(
    llama: Any, prompt: Prompt
) -> None:
    def hole(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx != 9)

    rows: list[Tensor] = []
    handle = llama.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: rows.append(args[0][0].abs().amax(-1))
    )
    with (
        torch.no_grad(),
        FlexPatch(llama, UserMaskSource(hole, name="h", device=CPU), compiled=False),
    ):
        llama(torch.tensor([prompt.ids]))
    handle.remove()
    assert (rows[0] == 0).nonzero().flatten().tolist() == [9]


# -- rules as plug-ins -----------------------------------------------------------------------------


def test_the_built_in_rules_are_registered_as_plug_ins() -> None:
    rules, failed = built_in_rules()
    assert {"numbers", "rows"} <= {rule.name for rule in rules}
    assert failed == {}
    again, _ = built_in_rules()
    assert not {id(rule) for rule in rules} & {id(rule) for rule in again}


def test_a_rule_that_cannot_be_loaded_or_created_is_an_event_in_the_trace(
    llama: Any, prompt: Prompt, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = plugins.load_all

    def unmade() -> Rule:
        raise ZeroDivisionError("not made")

    def load_all(group: str) -> tuple[dict[str, Any], dict[str, str]]:
        loaded, failed = original(group)
        if group == "flexinspect.rules":
            return {**loaded, "unmade": unmade}, {"absent": "It is not there."}
        return loaded, failed

    monkeypatch.setattr(plugins, "load_all", load_all)
    rule_events = record_run(llama, prompt, out)
    assert rule_events == [
        "absent: It is not there.",
        "unmade: It could not be made: ZeroDivisionError: not made",
    ]


class Raising(Rule):
    """A rule that raises at step 2."""

    name: ClassVar[str] = "raising"
    findings: ClassVar[Mapping[str, FindingKind]] = {}

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_generation_start(self, context: object) -> None:
        self.steps.clear()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        self.steps.append(step.step)
        if step.step == 2:
            raise ZeroDivisionError("at two")
        return ()


def test_a_rule_that_raises_is_switched_off_and_the_run_continues(
    llama: Any, prompt: Prompt, out: Path
) -> None:
    raising, others = Raising(), built_in_rules()[0]
    llama.model.layers[2].mlp.down_proj.weight.data[3, 3] = torch.nan
    rule_events = record_run(llama, prompt, out, rules=[raising, *others])
    assert rule_events == [
        "The rule 'raising' failed at step 2 and is off: ZeroDivisionError: at two"
    ]
    assert raising.steps == [0, 1, 2]
    with open_trace(out) as reader:
        assert reader.n_steps(0) == NEW
        assert [f.layer for f in reader.findings()] == [2]


def test_a_finding_is_readable_during_the_run(
    inf_at_step_3: Any, prompt: Prompt, out: Path
) -> None:
    seen: dict[int, list[Finding]] = {}

    def peek(step: int) -> None:
        if step not in (2, 4):
            return
        deadline = time.monotonic() + (PATIENCE_S if step == 4 else 0)
        with open_trace(out) as reader:
            while not (found := reader.findings()) and time.monotonic() < deadline:
                time.sleep(0.02)
        seen[step] = found

    record_run(inf_at_step_3, prompt, out, on_step=peek)
    assert seen[2] == []
    assert [finding.step for finding in seen[4]] == [3]


def test_dump_prints_findings_with_their_sentence(llama: Any, prompt: Prompt, out: Path) -> None:
    llama.model.layers[2].mlp.down_proj.weight.data[3, 3] = torch.nan
    record_run(llama, prompt, out)
    done = subprocess.run(
        [sys.executable, "-m", "flexinspect", "dump", str(out)],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert "error  numbers.nan  generation 0  branch 0  step 0  layer 2" in done.stdout
    assert "NaN first appears in the output of layer 2 (model.layers.2)" in done.stdout
