"""The benchmark that leaves out parts of capture runs, on a small model, and leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import make_model

import flexinspect
from benchmarks import parts
from flexinspect_hooks.observers.attention.attention_hook import AttentionHook


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK": 4, "UNTIMED": 1, "LINGER_S": 0.0}.items():
        monkeypatch.setattr(parts, name, value)


def test_every_part_of_every_level_has_a_row() -> None:
    facts = parts.measure(make_model("llama", vocab_size=600), 0.0)
    rows = parts.table(facts).splitlines()[2:]
    assert len(rows) == 2 + len(parts.cases())  # the head, and the parts
    assert all(one["blocks"] >= 3 for one in facts["parts"])
    assert facts["ms_without"] > 0
    stated = {one["part"]: one.get("stated_ms") for one in facts["parts"]}
    assert stated.pop(parts.ALL) > 0
    assert set(stated.values()) == {None}  # only a whole run states its cost
    assert rows[-1].count("points)") == 1


@pytest.mark.parametrize("level_and_name", list(parts.cases())[1:], ids=" ".join)
def test_a_part_leaves_out_what_it_says(
    level_and_name: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    opened = AttentionHook.open

    def note(hook: AttentionHook, step: object) -> None:
        kept.append(len(hook._refs))
        opened(hook, step)  # type: ignore[arg-type]

    monkeypatch.setattr(AttentionHook, "open", note)
    model, path = make_model("llama", vocab_size=600), tmp_path / "part.flextrace"
    name = level_and_name[1]
    with parts.cases()[level_and_name](model, path):
        loop = parts.GreedyLoop(model, range(5, 25))
        loop.begin()
        loop.run_block()
    n_layers = model.config.num_hidden_layers
    # Only this part drops what a forward left when the next one begins.
    assert (max(kept, default=0) == n_layers) is (name == parts.IN_LAYERS)
    with flexinspect.open_trace(path) as reader:
        n_steps = reader.n_steps(0) if reader.generations() else 0
        calls = reader.calls(0, 1) if n_steps else []
    assert bool(n_steps) is (name in (parts.WITHOUT_HOOKS, parts.ALL))
    assert bool(calls) is (name == parts.ALL)
