"""The audit over small random models of many families; the table in docs/audit.md is made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.captures import capture
from support.paths import DOCS, TESTS

from flexinspect.records.step import EventRecord
from flexinspect.rules.numerics.audit_findings import AUDIT_EVENT, AUDIT_SKIPPED_EVENT
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.audit.trace_audit import audit_trace

pytestmark = pytest.mark.slow

GEMMA = '"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16'
HYBRID = (
    '"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, '
    '"attn_layer_indices": [1]'
)
SINKS = (
    '"head_dim": 12, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 9, '
    '"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}'
)
BART = (
    '"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 2, '
    '"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None'
)
FAMILIES = {
    "Llama": ("llama", ""),
    "Mistral": ("mistral", '"sliding_window": 9'),
    "Qwen2": ("qwen2", ""),
    "Qwen3": ("qwen3", '"head_dim": 16'),
    "Gemma 2": ("gemma2", GEMMA),
    "Gemma 3": ("gemma3_text", GEMMA),
    "Phi-3": ("phi3", ""),
    "OLMo 2": ("olmo2", ""),
    "GPT-2": ("gpt2", ""),
    "GPT-NeoX": ("gpt_neox", ""),
    "Falcon": ("falcon", ""),
    "GPT-OSS": ("gpt_oss", SINKS),
    "Mixtral": ("mixtral", ""),
    "Bamba (state-space hybrid)": ("bamba", HYBRID),
    "T5": (
        "t5",
        '"d_model": 32, "d_kv": 8, "num_decoder_layers": 2, "decoder_start_token_id": 0',
    ),
    "BART": (
        "bart",
        BART,
    ),
}
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
import transformers
from support.tiny import COMMON, ids
torch.set_num_threads(1)
models = []
for kind, more in {families!r}:
    torch.manual_seed(0)
    options = {{**COMMON, "num_hidden_layers": 2, **more}}
    config = transformers.AutoConfig.for_model(kind, **options)
    auto = transformers.AutoModelForCausalLM
    if kind in ("t5", "bart"):
        auto = transformers.AutoModelForSeq2SeqLM
    eager = kind in ("gemma2", "gpt_oss")
    model = auto.from_config(config, attn_implementation="eager" if eager else "sdpa").eval()
    model.save_pretrained({folder!r} + kind)
    model.name_or_path = {folder!r} + kind
    models.append(model)
    model.generate(torch.tensor([ids(12, 3)]), max_new_tokens=3, do_sample=False)
"""

KINDS = (AUDIT_EVENT, AUDIT_SKIPPED_EVENT)


def test_the_table_of_families_is_true(tmp_path: Path) -> None:
    script, out = tmp_path / "program.py", tmp_path / "families.flextrace"
    families = [(kind, eval(f"{{{more}}}")) for kind, more in FAMILIES.values()]
    folder = f"{tmp_path}/"
    text = SCRIPT.format(tests=str(TESTS), families=families, folder=folder)
    script.write_text(text, encoding="utf-8")
    ran = capture(script, out)
    assert ran.code == 0, ran.err
    with open_trace(out) as reader:
        events = [row.event for row in reader.events() if row.event.kind in KINDS]
        assert not [one for one in reader.findings() if one.id.startswith("audit.")]
    table = _table(events)
    if os.environ.get("UPDATE_GOLDENS"):
        print(table)
    assert table in (DOCS / "audit.md").read_text(encoding="utf-8")
    again = audit_trace(out)
    assert not again.findings
    assert [one.data["steps"] for one in again.events] == [3] * (len(FAMILIES) - 2)
    # The encoders are models of their own in the trace.
    kinds = ["T5" in str(one) or "t5" in str(one) for one in again.problems]
    assert kinds == [True, True, False, False], again.problems


def _table(events: list[EventRecord]) -> str:
    # The encoder of a model is a model of its own in the trace, and its generation has no event.
    judged = [event for event in events if event.kind == AUDIT_EVENT]
    assert len(judged) == len(FAMILIES)
    by_generation = dict(enumerate(sorted(judged, key=lambda event: event.generation or 0)))
    lines = ["| family | compared | result |", "|---|---|---|"]
    for number, name in enumerate(FAMILIES):
        event = by_generation.get(number)
        if event is None or not event.data.get("steps"):
            reason = "" if event is None else str(event.data.get("reason", ""))
            lines.append(f"| {name} | — | not judged: {reason} |")
            continue
        compared = ", ".join(event.data["quantities"])
        lines.append(f"| {name} | {compared} | {event.data['steps']} steps agree |")
    return "\n".join(lines)
