"""Programs that call the decoder layers of a model one after the other, and not the model."""

from __future__ import annotations

import textwrap
from pathlib import Path

from support.paths import TESTS
from support.warm_python import run_command

from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.user_code.model_discovery import LAYER_LOOP_EVENT

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
    return model.lm_head(body.norm(hidden[:, -1]))  # without a dimension of rows

"""

DECODE = """
chosen = []
rows, positions = torch.tensor([ids(11, 3)]), torch.arange(11)[None]
for n in range(4):
    token = logits_of(rows, positions).argmax(-1)
    chosen.append(token.item())
    rows, positions = token[:, None], torch.tensor([[11 + n]])
print(chosen)
"""


def recorded(folder: Path, script: str, *arguments: str) -> tuple[TraceReader, str]:
    (folder / "loop.py").write_text(LOOP + textwrap.dedent(script), "utf-8")
    flags = ("--no-ui", "--out", "t.flextrace", "loop.py", *arguments)
    done = run_command("run", *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
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


def test_a_fault_of_a_loop_over_the_layers_is_named(tmp_path: Path) -> None:
    reader, _ = recorded(tmp_path, DECODE, "rounded")
    with reader:
        (found,) = (one for one in reader.findings() if one.id == "audit.reproduced")
    assert "angles of RoPE computed in bfloat16" in found.sentence


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
