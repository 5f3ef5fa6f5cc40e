"""A user's mask_mod as cells of a mask, and prompts with words, without a model."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flexinspect.core import plugins
from flexinspect.core.errors import DatasetError, MaskError, ModelError
from flexinspect.masks.known_masks import dense
from flexinspect.masks.mask_analysis import analyse_mask
from flexinspect.masks.mask_expressions import parse_mask
from flexinspect.masks.size_presets import MaskConfig
from flexinspect.masks.verification import verify_mask
from flexinspect.records.job import Job
from flexinspect_hooks.ensemble.mask_laboratory import compose_prompts

CONFIG = MaskConfig(3, 40, 2, 4)
SEGMENTS, N = CONFIG.segments(), CONFIG.length


def made(segments: Any) -> Any:
    """Segment isolation as a user writes it, with a table of documents."""
    document = torch.zeros(N, dtype=torch.int64)
    for index, segment in enumerate(segments):
        document[segment.start : segment.stop] = segment.owner if index < 5 else -1

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & ((document[q] == document[kv]) | (document[q] == -1))

    return mask_mod


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("user_masks")
    module.isolated = made
    module.causal = lambda b, h, q, kv: kv <= q
    module.per_head = lambda b, h, q, kv: (kv <= q) & (q - kv < (h + 1) * 8)
    module.strides = lambda b, h, q, kv: (kv <= q) & ((q - kv) % 3 == 0)
    module.number = lambda b, h, q, kv: q - kv
    module.branches = lambda b, h, q, kv: kv <= q if q > 3 else kv < 1
    module.small_table = lambda b, h, q, kv: torch.arange(9)[q] >= kv
    monkeypatch.setitem(sys.modules, "user_masks", module)


def load(name: str, **options: Any) -> Any:
    return plugins.load(plugins.CAPTURE, "mask-mod")(f"user_masks:{name}", SEGMENTS, **options)


def test_the_cells_of_a_mask_mod_are_those_of_the_rule() -> None:
    assert (dense(load("causal"), N, N) == np.tri(N, dtype=bool)).all()
    rows, keys = np.array([5, 120], np.int32), np.array([0, 5, 119], np.int32)
    assert load("causal").cells(rows, keys).tolist() == [[True, True, False], [True] * 3]


def test_a_mask_mod_made_from_segments_equals_the_declared_preset() -> None:
    declared = parse_mask("segment-isolation", SEGMENTS)
    assert verify_mask(load("isolated"), SEGMENTS, declared=declared).passed
    result = verify_mask(load("causal"), SEGMENTS, declared=declared)
    assert result.failed == ("isolation", "declared")


def test_each_head_is_evaluated_with_its_own_index() -> None:
    mask = load("per_head", heads=3)
    assert mask.n_heads == 3
    for head in range(3):
        expected = parse_mask(f"sliding-window({8 * (head + 1)})")
        assert (dense(mask, N, N, head) == dense(expected, N, N)).all()


@pytest.mark.parametrize("name", ["isolated", "causal", "strides"])
def test_counted_blocks_are_those_of_create_block_mask(name: str) -> None:
    mask = load(name)
    for n, size in ((N, 16), (128, 32)):
        if n > N:
            continue
        block_mask = create_block_mask(
            mask.mask_mod, None, None, n, n, device="cpu", BLOCK_SIZE=size
        )
        work = analyse_mask(mask, n, n, segments=SEGMENTS, block_size=size).blocks
        assert block_mask.full_kv_num_blocks is not None
        assert work.full == int(block_mask.full_kv_num_blocks.sum())
        assert work.partial == int(block_mask.kv_num_blocks.sum())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "returned a tensor of torch.int64"),
        ("branches", "cannot be vectorised"),
        ("absent", "The mask_mod user_masks:absent cannot be loaded"),
    ],
)
def test_a_rule_that_flex_attention_would_refuse_is_refused(name: str, message: str) -> None:
    with pytest.raises(MaskError, match=message) as error:
        load(name)
    assert "\n" not in error.value.message


def test_a_rule_that_raises_later_is_one_sentence_with_its_rows() -> None:
    mask = load("small_table")
    with pytest.raises(MaskError, match="failed for rows 0 to 127 and keys 0 to 127: Index"):
        verify_mask(mask, n_rows=N, n_keys=N)


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError):
        load("causal", device="cuda:99")


def test_a_prompt_is_composed_with_its_words_from_the_tokenizer_alone() -> None:
    job = Job(out="", prompts=("Who wrote Emma?", "Emma's author?"), max_new_tokens=3)
    ((name, prompt, words),) = compose_prompts(job)
    assert name == "prompt"
    assert [s.label for s in prompt.segments if "paraphrase" in s.label] == [
        "paraphrase 1",
        "paraphrase 2",
    ]
    first = next(s for s in prompt.segments if s.label == "paraphrase 1")
    assert "".join(words[at] for at in range(first.start, first.stop)) == "Who wrote Emma?"
    assert prompt.segments[-1].stop == len(prompt.ids) + 3


def test_samples_of_a_dataset_are_composed_one_by_one() -> None:
    names = [name for name, *_ in compose_prompts(Job(out="", max_samples=2))]
    assert len(names) == len(set(names)) == 2
    with pytest.raises(DatasetError):
        list(compose_prompts(Job(out="", dataset="no-such-set")))
