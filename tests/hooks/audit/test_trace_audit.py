"""`flexinspect audit TRACE`: steps are judged by digests, with weights that are made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ids, make_model
from transformers import AutoModelForCausalLM

import flexinspect
from flexinspect.trace.file import connections
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.audit.evidence.trace_evidence import read_recorded_steps
from flexinspect_hooks.audit.trace_audit import ONLY_LOGITS, UNKNOWN_WEIGHTS, audit_trace

ROW = ids(12, 3)
BATCH = [ids(12, 3), (0,) * 4 + ids(8, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def record(path: Path, model: Any, *prompts: Any, **options: Any) -> Path:
    with flexinspect.watch(model, out=path), torch.no_grad():
        for prompt in prompts:
            model.generate(torch.tensor(prompt), max_new_tokens=5, do_sample=False, **options)
    return path


@pytest.fixture
def without_rope_from_step_2() -> Iterator[None]:
    from transformers.models.llama import modeling_llama

    original, n_calls = modeling_llama.apply_rotary_pos_emb, 0

    def apply(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return (q, k) if n_calls > 6 else original(q, k, *args, **kwargs)  # 3 layers

    modeling_llama.apply_rotary_pos_emb = apply
    yield
    modeling_llama.apply_rotary_pos_emb = original


def test_all_steps_of_a_correct_run_agree(tmp_path: Path, model: Any) -> None:
    found = audit_trace(record(tmp_path / "t.flextrace", model, [ROW], [ids(20, 4)]))
    assert not found.findings
    assert not found.problems
    assert [(one.data["steps"], one.data["rows"]) for one in found.events] == [(5, 12), (5, 12)]
    for event in found.events:
        assert event.data["quantities"] == ["hidden state", "logits"]
        assert event.data["largest"] < 1e-5
        assert not event.data["notes"]


def test_a_fault_is_named_with_its_step_by_digests_alone(
    tmp_path: Path, model: Any, without_rope_from_step_2: None
) -> None:
    found = audit_trace(record(tmp_path / "t.flextrace", model, [ROW]))
    assert [one.id for one in found.findings] == ["audit.reproduced"]
    assert found.findings[0].sentence.startswith("Layer 0, step 2: the numbers are those of a")
    assert "without RoPE" in found.findings[0].sentence
    assert found.findings[0].sentence.endswith("So are those of the 2 later steps.")


def test_where_nothing_fits_the_layer_is_that_of_the_fault(tmp_path: Path, model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ELU()
    found = audit_trace(record(tmp_path / "t.flextrace", model, [ROW]))
    assert [(one.id, one.layer, one.step) for one in found.findings] == [
        ("audit.unexplained", 1, 0)
    ]


def test_another_activation_is_named_by_digests_alone(tmp_path: Path, model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    found = audit_trace(record(tmp_path / "t.flextrace", model, [ROW]))
    words = "whose mlp has ReLU as activation in this layer only"
    assert [words in one.sentence for one in found.findings] == [True], found.findings


def test_rows_of_a_padded_batch_are_judged_one_by_one(tmp_path: Path, model: Any) -> None:
    mask = (torch.tensor(BATCH) != 0).long()
    path = record(tmp_path / "t.flextrace", model, BATCH, attention_mask=mask)
    found = audit_trace(path)
    assert not found.findings, found.findings
    assert [one.data["batch"] for one in found.events] == [0, 1]
    assert [one.data["steps"] for one in found.events] == [5, 5]


def test_a_fault_in_one_row_of_a_batch_is_found_there(tmp_path: Path, model: Any) -> None:
    def first_row_for_all(module: Any, args: Any, output: Any) -> Any:
        return output[:1].expand_as(output) if output.shape[1] == 1 else output

    model.model.layers[1].mlp.register_forward_hook(first_row_for_all)
    found = audit_trace(record(tmp_path / "t.flextrace", model, [ROW, ids(12, 5)]))
    assert [(one.layer, one.step) for one in found.findings] == [(1, 1)]
    assert "batch row 1" in found.findings[0].sentence


def test_steps_in_bfloat16_are_judged_with_the_noise_of_bfloat16(
    tmp_path: Path, folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = audit_trace(record(tmp_path / "t.flextrace", model, [ROW]))
    assert not found.findings
    assert found.events[0].data["steps"] == 5
    assert found.events[0].data["largest"] > 1e-4


def test_other_weights_are_not_judged_and_named(tmp_path: Path, model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.1)
    found = audit_trace(record(tmp_path / "t.flextrace", model, [ROW]))
    assert not found.findings
    assert "model.layers.2.mlp.up_proj.weight differs" in found.events[0].text
    assert found.events[0].data["steps"] == 0


def test_the_user_may_name_the_weights(tmp_path: Path, folder: Path) -> None:
    path = record(tmp_path / "t.flextrace", make_model("llama"), [ROW])
    [problem] = audit_trace(path).problems
    assert "names no weights of its LlamaForCausalLM" in problem.message
    assert problem.hint is not None
    assert "flexinspect audit SCRIPT" in problem.hint
    found = audit_trace(path, model=str(folder))
    assert [one.data["steps"] for one in found.events] == [5]
    other = tmp_path / "other"
    make_model("llama", num_hidden_layers=2).save_pretrained(other)
    [event] = audit_trace(path, model=str(other)).events
    assert "30 parameters, and 21 were loaded, so it is another model" in event.text


def test_a_folder_that_is_gone_and_a_model_that_is_not_here_are_named(
    tmp_path: Path, model: Any
) -> None:
    for name, words in (("./gone", "no model folder"), ("owner/name-xyz", "not on this machine")):
        model.name_or_path = name
        path = record(tmp_path / f"{name[-3:]}.flextrace", model, [ROW])
        [problem] = audit_trace(path).problems
        assert words in problem.message
        assert problem.hint


def forget(path: Path, sql: str) -> None:
    with closing(connections.sqlite3.connect(path)) as db, db:
        db.execute(sql)


def test_a_trace_without_digests_is_judged_by_its_logits(tmp_path: Path, model: Any) -> None:
    path = record(tmp_path / "t.flextrace", model, [ROW])
    forget(path, "DELETE FROM arrays WHERE stream LIKE 'audit.%'")
    found = audit_trace(path)
    assert not found.findings
    assert found.events[0].data["quantities"] == ["logits"]
    assert found.events[0].data["notes"] == [UNKNOWN_WEIGHTS, ONLY_LOGITS]


Change = Callable[[Path], None]


def test_steps_whose_tokens_are_missing_are_not_judged(tmp_path: Path, model: Any) -> None:
    path = record(tmp_path / "t.flextrace", model, [ROW])
    forget(path, "DELETE FROM tokens WHERE pos = 14")
    found = audit_trace(path)
    assert not found.findings
    assert found.events[0].data["steps"] == 3
    assert found.events[0].data["not_judged"] == [
        "from step 3 on: the trace lacks tokens that were fed"
    ]


def test_a_score_mod_and_training_mode_are_noted_in_the_trace(tmp_path: Path, model: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from transformers import AttentionInterface

    def own(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        def farther_is_less(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
            return score - (row - key) * 0.1

        output = flex_attention(q, k, v, score_mod=farther_is_less, enable_gqa=True)
        return output.transpose(1, 2), None

    AttentionInterface.register("own", own)
    try:
        model.set_attn_implementation("own")
        model.train()
        path = record(tmp_path / "t.flextrace", model, [ROW])
    finally:
        del AttentionInterface._global_mapping["own"]
    with open_trace(path) as reader:
        recorded = read_recorded_steps(reader, 0)
        kinds = {row.event.kind for row in reader.events(generation=0)}
    assert not recorded.steps
    assert recorded.problem == "from step 0 on: a score_mod ran, which a trace does not hold"
    assert {"score-mod", "training-mode"} <= kinds
