"""The synthetic traces have the records of a real run, and they are consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import synthetic
from flexinspect.masks import key_blocks, mask_presets
from flexinspect.trace.reader import TraceReader, open_trace


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> TraceReader:
    path = tmp_path_factory.mktemp("long") / "long.flextrace"
    return open_trace(synthetic.long_trace(path, steps=1_300))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TraceReader:
    path = tmp_path_factory.mktemp("wide") / "wide.flextrace"
    return open_trace(synthetic.wide_trace(path, tokens=600, steps=4))


def test_a_long_trace_has_every_step_and_a_token_for_each(long: TraceReader) -> None:
    assert long.n_steps(0) == 1_300
    tokens = long.tokens(0)
    assert [token.pos for token in tokens] == list(range(259 + 1_300))
    assert [token.step for token in tokens[259:]] == list(range(1_300))
    assert {token.text.strip() for token in tokens} <= set(synthetic.WORDS)


def test_its_answer_is_its_tokens_joined(long: TraceReader) -> None:
    generated = long.tokens(0, start=259)
    assert long.generation(0).answer == "".join(token.text for token in generated)
    assert long.generation(0).state == long.state == "finished"


def test_every_step_has_what_a_step_of_level_advanced_has(long: TraceReader) -> None:
    for step in (0, 1, 700, 1_299):
        record = long.record(0, step)
        assert record is not None
        assert record.logits is not None
        assert record.memory is not None
        assert len(record.logits.candidates) == 10
        assert len(record.calls) == len(record.layer_stats) == 8
        assert record.kv_after == 259 + step
        assert {call.mask for call in record.calls} == {record.masks[0].fingerprint}
        assert [call.kv_len for call in record.calls] == [record.kv_after] * 8


def test_the_chosen_token_stands_at_its_rank_among_the_candidates(long: TraceReader) -> None:
    ranks = set()
    for step in range(200):
        logits = long.logits(0, step)
        assert logits is not None
        chosen = logits.candidates[logits.chosen_rank]
        assert chosen.token_id == logits.chosen_id == long.step_tokens(0, step)[0].token_id
        assert chosen.logprob == logits.chosen_logprob
        assert sum(np.exp([one.logprob for one in logits.candidates])) <= 1 + 1e-9
        assert sum(logits.histogram) == synthetic.VOCABULARY
        ranks.add(logits.chosen_rank)
    assert ranks == {0, 1}


def test_attention_is_thinned_as_the_module_says(long: TraceReader) -> None:
    has = [step for step in range(1_300) if long.arrays(0, step)]
    assert has == [*range(0, 300, 5), *range(300, 1_300)]
    mass = long.array(0, 1_299, "attention.mass")
    assert mass is not None
    assert mass.shape == (8, 8, 13)
    assert np.allclose(mass.sum(axis=2), 1)


def test_a_few_steps_are_nonfinite_and_have_findings(long: TraceReader) -> None:
    assert [finding.step for finding in long.findings()] == [910, 911, 912, 913, 914]
    assert [stat.n_nan for stat in long.layer_stats(0, 910)] == [0] * 5 + [3] * 3
    assert [stat.n_nan for stat in long.layer_stats(0, 909)] == [0] * 8


def test_the_mask_of_a_wide_trace_is_segment_isolation(wide: TraceReader) -> None:
    mask = wide.mask(wide.calls(0, 0)[0].mask or "")
    assert mask is not None
    assert mask.cells is not None
    assert mask.partial is not None
    assert mask.full is not None
    spec = mask_presets.preset("segment-isolation", wide.segments(0))
    assert np.array_equal(mask.cells, spec.dense(600)[None])
    tables = key_blocks.block_tables(spec, 600, 600)
    assert np.array_equal(mask.partial[0], tables.partial)
    assert np.array_equal(mask.full[0], tables.full)


def test_a_wide_prompt_has_as_many_tokens_as_asked_for(wide: TraceReader) -> None:
    segments = wide.segments(0)
    assert segments[-1].start == 600
    assert [segment.kind for segment in segments].count("paraphrase") == 8
    assert wide.n_steps(0) == 4
    assert wide.run()["model"]["layers"] == 8


def test_the_same_arguments_give_the_same_records(tmp_path: Path, wide: TraceReader) -> None:
    again = open_trace(synthetic.wide_trace(tmp_path / "again.flextrace", tokens=600, steps=4))
    for step in range(4):
        assert _said(again, step) == _said(wide, step)
    assert _said(again, 2) != _said(again, 3)


def _said(reader: TraceReader, step: int) -> tuple[Any, ...]:
    record = reader.record(0, step)
    assert record is not None
    arrays = [(one.stream, one.array.tobytes()) for one in record.arrays]
    cells = [None if mask.cells is None else mask.cells.tobytes() for mask in record.masks]
    return record.tokens, record.logits, record.calls, record.layer_stats, arrays, cells


def test_progress_is_reported_up_to_the_last_step(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    synthetic.long_trace(tmp_path / "short.flextrace", 260, lambda *counts: reported.append(counts))
    assert reported == [(250, 260), (260, 260)]
