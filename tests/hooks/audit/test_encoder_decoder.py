"""The audit of models with an encoder: correct programs agree, and planted faults are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import COMMON, ids
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from flexinspect.records.finding import Finding
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore
from flexinspect_hooks.audit.program_audit import AuditOptions, Verdict
from flexinspect_hooks.audit.session_audit import AuditBudget, audit_session
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.loading.tokenizers import IdAdapter
from flexinspect_hooks.user_code.generation_builder import DeclaredPrompt
from flexinspect_hooks.user_code.watch_session import WatchSession

Audit = Callable[[Any, Callable[[], object]], tuple[list[Verdict], list[Finding]]]

OPTIONS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "bart": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "init_std": 0.2,
        "forced_eos_token_id": None,
    },
}


def make(family: str) -> Any:
    torch.manual_seed(0)
    options = {**COMMON, **OPTIONS[family], "decoder_start_token_id": 2}
    config = AutoConfig.for_model(family, **options)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa").eval()
    for name, parameter in model.requires_grad_(False).named_parameters():
        if "relative" in name:
            parameter.mul_(20)
    return model


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    def run(model: Any, program: Callable[[], object]) -> tuple[list[Verdict], list[Finding]]:
        path = tmp_path / "t.flextrace"
        writer = create_trace(path, (), "advanced", None)
        session = WatchSession(model, writer, DeclaredPrompt(IdAdapter()), level="advanced")
        store = session.context.evidence = EvidenceStore()
        with session, torch.no_grad():
            program()
            session.close("finished", None)
            budget = AuditBudget(AuditOptions(seconds=600.0))
            verdicts = audit_session(store, session.recorder, session.rule_runner, budget)
        writer.close("finished")
        with open_trace(path) as reader:
            return verdicts, [one for one in reader.findings() if one.id.startswith("audit.")]

    return run


def padded() -> tuple[Tensor, Tensor]:
    """Two texts of 12 and 8 tokens."""
    rows = torch.tensor([ids(12, 3), (*ids(8, 4), 0, 0, 0, 0)])
    return rows, (rows != 0).long()


def decode(model: Any, *, masked_steps: int = 4) -> None:
    """Feed four tokens after the start token; the first steps have the mask of the encoder."""
    rows, mask = padded()
    encoded, past = model.get_encoder()(rows, attention_mask=mask), None
    for step, token in enumerate((2, *ids(3, 5))):
        output = model(
            encoder_outputs=encoded,
            attention_mask=mask if step < masked_steps else None,
            decoder_input_ids=torch.tensor([[token], [token]]),
            past_key_values=past,
            use_cache=True,
        )
        past = output.past_key_values


@pytest.mark.parametrize("family", OPTIONS)
@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cache", "no cache"])
def test_every_step_of_generate_agrees(
    audit: Audit, family: str, options: dict[str, object]
) -> None:
    model, (rows, mask) = make(family), padded()
    arguments = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, **options}
    verdicts, findings = audit(model, lambda: model.generate(rows, **arguments))
    assert not findings
    assert {(one.n_steps, len(one.notes), len(one.not_judged)) for one in verdicts} == {(3, 0, 0)}
    assert "encoder output" in verdicts[0].quantities
    assert "cross attention output" in verdicts[0].quantities


@pytest.mark.parametrize("family", OPTIONS)
def test_beams_are_judged_at_their_first_step_only(audit: Audit, family: str) -> None:
    model, (rows, mask) = make(family), padded()
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "num_beams": 3}
    verdicts, findings = audit(model, lambda: model.generate(rows, **options))
    assert not findings
    assert {one.n_steps for one in verdicts} == {1}
    assert all("from step 1 on: beams" in one.not_judged[0] for one in verdicts)


@pytest.mark.parametrize("family", OPTIONS)
def test_a_loop_with_cached_keys_agrees(audit: Audit, family: str) -> None:
    model = make(family)
    verdicts, findings = audit(model, lambda: decode(model))
    assert not findings
    assert [one.n_steps for one in verdicts] == [4, 4]


def test_an_encoder_output_whose_input_is_not_known_is_taken_as_it_is(audit: Audit) -> None:
    model = make("bart")
    states = (torch.randn(1, 9, model.config.d_model),)
    verdicts, findings = audit(
        model, lambda: model(encoder_outputs=states, decoder_input_ids=torch.tensor([ids(5, 3)]))
    )
    assert not findings
    assert [one.n_rows for one in verdicts] == [5]
    assert "the output of the encoder is taken as it is" in verdicts[0].notes[0]


@pytest.mark.parametrize("family", OPTIONS)
@pytest.mark.parametrize("masked_steps", [0, 1])
def test_cross_attention_that_reads_padding_is_named(
    audit: Audit, family: str, masked_steps: int
) -> None:
    model = make(family)
    _, findings = audit(model, lambda: decode(model, masked_steps=masked_steps))
    assert [one.step for one in findings] == [masked_steps]
    words = "cross attention reads the padding of the encoder's input"
    assert words in findings[0].sentence
    assert "batch row 1" in findings[0].sentence


@pytest.mark.parametrize("family", OPTIONS)
def test_an_encoder_that_reads_padding_is_named(audit: Audit, family: str) -> None:
    model, (rows, _) = make(family), padded()
    start = torch.tensor([[2, 7, 9], [2, 8, 5]])
    _, findings = audit(model, lambda: model(input_ids=rows, decoder_input_ids=start))
    assert len(findings) == 1
    words = "whose encoder and cross attention read the padding"
    assert words in findings[0].sentence


@pytest.mark.parametrize("fault", ["missing", "without an offset"])
def test_a_wrong_relative_bias_in_decode_steps_is_named(
    audit: Audit, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("t5")
    attention = type(model.decoder.block[0].layer[0].SelfAttention)
    right = attention.compute_bias

    def wrong(self: Any, rows: int, keys: int, past_seen_tokens: int = 0, **options: Any) -> Tensor:
        if fault == "missing" and past_seen_tokens:
            zeros: Tensor = right(self, rows, keys, **options) * 0
            return zeros
        bias: Tensor = right(self, rows, keys, past_seen_tokens=0, **options)
        return bias

    monkeypatch.setattr(attention, "compute_bias", wrong)
    _, findings = audit(model, lambda: decode(model))
    assert {one.step for one in findings} == {1}
    # The bias of row 0 is the same for all earlier keys, so that softmax does not see it.
    for one in findings:
        assert "decode rows have no relative position bias" in one.sentence


def test_positions_that_stay_0_in_decode_steps_are_named(audit: Audit) -> None:
    model = make("bart")
    table = model.model.decoder.embed_positions
    right = table.forward

    def wrong(rows: Tensor, n: int = 0, position_ids: Any = None) -> Any:
        return right(rows, n, position_ids=torch.zeros_like(position_ids))

    table.forward = wrong
    _, findings = audit(model, lambda: decode(model))
    assert {one.step for one in findings} == {1}
    assert all("position 0 for every row" in one.sentence for one in findings)


def test_a_cross_attention_without_effect_is_named_with_its_layer(audit: Audit) -> None:
    model = make("bart")
    module = model.model.decoder.layers[1].encoder_attn
    right = module.forward
    module.forward = lambda *args, **kwargs: (right(*args, **kwargs)[0] * 0, None)
    _, findings = audit(model, lambda: decode(model))
    assert {(one.layer, one.step) for one in findings} == {(1, 0)}
