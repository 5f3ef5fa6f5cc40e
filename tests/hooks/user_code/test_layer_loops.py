"""Programs that call the decoder layers of a model one after the other, and not the model."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support.paths import TESTS
from support.warm_python import run_command

from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.audit.evidence.step_evidence import OWN_KEYS
from flexinspect_hooks.user_code.model_discovery import BASE_MODEL, LAYER_LOOP_EVENT

LOOP = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.tiny import ids, make_model
from transformers import DynamicCache
model = make_model("llama", num_hidden_layers=2)
body, cache = model.model, DynamicCache(config=model.config)

@torch.no_grad()
def logits_of(rows, positions):
    past = cache.get_seq_length()
    if "shifted" in sys.argv and past:
        positions = positions + 1
    hidden = body.embed_tokens(rows)
    cos, sin = body.rotary_emb(hidden, positions)
    if "rounded" in sys.argv:
        angles = positions[0, :, None].bfloat16() * body.rotary_emb.inv_freq.bfloat16()
        both = torch.cat((angles, angles), -1)[None]
        cos, sin = both.cos().float(), both.sin().float()
    n = rows.shape[1]
    mask = torch.full((n, past + n), -torch.inf).triu(past + 1)[None, None]
    for layer in body.layers:
        hidden = layer(
            hidden, attention_mask=mask, position_embeddings=(cos, sin), past_key_values=cache
        )
        if "lens" in sys.argv:
            model.lm_head(body.norm(hidden[:, -1]))
    return model.lm_head(body.norm(hidden[:, -1]))  # without a dimension of rows

"""

PARTS = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.tiny import ids, make_model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
model = make_model("llama", num_hidden_layers=2)
body, known = model.model, {{}}

def attend(q, k, v):
    if "by hand" in sys.argv:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        n, m = q.shape[2], k.shape[2]
        mask = torch.full((n, m), -torch.inf).triu(m - n + 1)
        return (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

@torch.no_grad()
def logits_of(rows, positions):
    hidden = body.embed_tokens(rows)
    cos, sin = body.rotary_emb(hidden, positions)
    for n, layer in enumerate(body.layers):
        x, own = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (
            one(x).view(1, rows.shape[1], -1, own.head_dim).transpose(1, 2)
            for one in (own.q_proj, own.k_proj, own.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if n in known:
            k, v = torch.cat((known[n][0], k), 2), torch.cat((known[n][1], v), 2)
        known[n] = k, v
        if "scaled" in sys.argv and n == 1:
            q = 1.5 * q
        if "left" in sys.argv and (n, q.shape[2], k.shape[2]) == (1, 1, 13):
            raise ValueError("in the second token")
        out = attend(q, k, v).transpose(1, 2).flatten(2)
        hidden = hidden + own.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        if "lens" in sys.argv and not n:
            model.lm_head(body.norm(hidden[:, -1:]))
    return model.lm_head(body.norm(hidden[:, -1:]))[:, 0]
"""

SIZES = [(11, 0), (1, 11), (1, 12), (1, 13)]
"""Rows and cached keys of the steps of `DECODE`."""
DECODE = """
chosen = []
rows, positions = torch.tensor([ids(11, 3)]), torch.arange(11)[None]
for n in range(4):
    token = logits_of(rows, positions).argmax(-1)
    chosen.append(token.item())
    rows, positions = token[:, None], torch.tensor([[11 + n]])
print(chosen)
"""


def recorded(
    folder: Path, script: str, *arguments: str, loop: str = LOOP
) -> tuple[TraceReader, str]:
    (folder / "loop.py").write_text(loop + textwrap.dedent(script), "utf-8")
    flags = ("--no-ui", "--out", "t.flextrace", "loop.py", *arguments)
    done = run_command("run", *flags, cwd=folder)
    assert done.returncode == ("left" in arguments), done.stderr
    return open_trace(folder / "t.flextrace"), done.stdout


def test_a_loop_over_the_layers_is_one_generation_and_agrees(tmp_path: Path) -> None:
    reader, printed = recorded(tmp_path, DECODE)
    with reader:
        (generation,) = reader.generations()
        steps = [reader.record(generation.generation, n) for n in range(4)]
        assert [step.q_len for step in steps] == [11, 1, 1, 1]
        assert [len(step.calls) for step in steps] == [2, 2, 2, 2]
        chosen = [one.token_id for one in reader.tokens(generation.generation)][11:]
        assert str(chosen)[:-1] in printed  # no forward received the last one
        assert len(chosen) == 3
        events = [row.event for row in reader.events()]
        assert sum(event.kind == LAYER_LOOP_EVENT for event in events) == 1
        assert any("4 steps, 14 rows agree" in event.text for event in events)
        assert [one.id for one in reader.findings() if one.severity != "note"] == []


@pytest.mark.parametrize("loop", ["LOOP", "PARTS"])
def test_the_logits_of_a_lens_do_not_end_a_step(tmp_path: Path, loop: str) -> None:
    reader, _ = recorded(tmp_path, DECODE, "lens", loop={"LOOP": LOOP, "PARTS": PARTS}[loop])
    with reader:
        assert any("4 steps, 14 rows agree" in row.event.text for row in reader.events())
        assert [one.id for one in reader.findings() if one.severity != "note"] == []


def test_a_fault_of_a_loop_over_the_layers_is_named(tmp_path: Path) -> None:
    reader, _ = recorded(tmp_path, DECODE, "rounded")
    with reader:
        (found,) = (one for one in reader.findings() if one.id == "audit.reproduced")
    assert "angles of RoPE computed in bfloat16" in found.sentence


@pytest.mark.parametrize("loop", ["LOOP", "BASE"])
def test_positions_are_those_of_which_the_angles_are_computed(tmp_path: Path, loop: str) -> None:
    reader, _ = recorded(tmp_path, DECODE, "shifted", loop={"LOOP": LOOP, "BASE": BASE}[loop])
    with reader:
        assert "positions.jump" in [one.id for one in reader.findings()]


def test_forwards_before_and_after_it_are_steps_too(tmp_path: Path) -> None:
    script = """
    rows = torch.tensor([ids(11, 3)])
    with torch.no_grad():
        model(rows, past_key_values=cache)
        logits_of(rows[:, :1], torch.tensor([[11]]))
        hidden = body.layers[0](  # a step that is never finished
            body.embed_tokens(rows[:, 1:2]), past_key_values=cache,
            position_embeddings=body.rotary_emb(rows.float(), torch.tensor([[12]])),
        )
        model(rows[:, :3])
    """
    reader, _ = recorded(tmp_path, script)
    with reader:
        first, second = reader.generations()
        assert [reader.record(first.generation, n).q_len for n in range(3)] == [11, 1, 1]
        assert reader.record(second.generation, 0).q_len == 3
        assert [one.id for one in reader.findings() if one.severity == "error"] == []


def test_a_loop_over_parts_of_layers_agrees(tmp_path: Path) -> None:
    reader, printed = recorded(tmp_path, DECODE, loop=PARTS)
    with reader:
        (generation,) = reader.generations()
        steps = [reader.record(generation.generation, n) for n in range(4)]
        assert [(step.q_len, step.kv_before) for step in steps] == SIZES
        assert [[call.layer for call in step.calls] for step in steps] == [[0, 1]] * 4
        chosen = [one.token_id for one in reader.tokens(generation.generation)][11:]
        assert str(chosen)[:-1] in printed
        assert any("4 steps, 14 rows agree" in row.event.text for row in reader.events())
        assert [one.id for one in reader.findings() if one.severity != "note"] == []


def test_a_fault_in_a_loop_over_parts_of_layers_is_placed(tmp_path: Path) -> None:
    reader, _ = recorded(tmp_path, DECODE, "scaled", loop=PARTS)
    with reader:
        (found,) = (one for one in reader.findings() if one.id.startswith("audit."))
    assert (found.step, found.layer) == (0, 1)
    assert "1.5 times" in found.sentence


def test_keys_that_no_kernel_call_shows_are_not_judged(tmp_path: Path) -> None:
    reader, _ = recorded(tmp_path, DECODE, "by hand", loop=PARTS)
    with reader:
        audits = [row.event.data for row in reader.events() if row.event.kind == "audit"]
        assert [(one["steps"], one["not_judged"]) for one in audits] == [
            (1, [OWN_KEYS.format(step=1)])
        ]
        assert [one.id for one in reader.findings() if one.severity != "note"] == []


def test_a_step_that_an_exception_leaves_is_not_recorded(tmp_path: Path) -> None:
    reader, _ = recorded(tmp_path, DECODE, "left", loop=PARTS)
    with reader:
        (generation,) = reader.generations()
        assert [step.q_len for step in reader.steps(generation.generation)] == [11, 1]
        (error,) = (row.event for row in reader.events() if row.event.kind == "error")
        assert (error.step, error.text) == (2, "ValueError: in the second token")
        assert reader.state == "failed"


BASE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.tiny import ids, make_model
model = make_model("llama", num_hidden_layers=2)
cache = None

@torch.no_grad()
def logits_of(rows, positions):
    global cache
    if "shifted" in sys.argv and cache is not None:
        positions = positions + 1
    out = model.model(rows, position_ids=positions, past_key_values=cache, use_cache=True)
    cache = out.past_key_values
    return model.lm_head(out.last_hidden_state[:, -1])

"""


def test_a_base_model_and_its_output_embeddings_are_one_generation(tmp_path: Path) -> None:
    reader, printed = recorded(tmp_path, DECODE, loop=BASE)
    with reader:
        (generation,) = reader.generations()
        steps = [reader.record(generation.generation, n) for n in range(4)]
        assert [(step.q_len, step.kv_before) for step in steps] == SIZES
        assert all(step.logits is not None for step in steps)
        chosen = [one.token_id for one in reader.tokens(generation.generation)][11:]
        assert str(chosen)[:-1] in printed
        events = [row.event for row in reader.events()]
        assert [e.text for e in events if e.kind == LAYER_LOOP_EVENT] == [BASE_MODEL]
        assert any("4 steps, 14 rows agree" in event.text for event in events)
        assert [one.id for one in reader.findings() if one.severity != "note"] == []


def test_a_base_model_alone_is_recorded_without_logits(tmp_path: Path) -> None:
    script = """
    rows = torch.tensor([ids(11, 3)])
    with torch.no_grad():
        print(model.model(rows).last_hidden_state.shape)
        print(model(rows).logits.shape)
    """
    reader, _ = recorded(tmp_path, script, loop=BASE)
    with reader:
        first, second = (reader.record(one.generation, 0) for one in reader.generations())
        assert (first.logits, first.q_len) == (None, 11)
        assert second.logits is not None
        assert [one.id for one in reader.findings() if one.severity != "note"] == []
