"""The shape of an ensemble: presets, segments, files, and refused values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.core.errors import UsageError
from flexinspect.masks.size_presets import (
    PRESET_CONFIGS,
    MaskConfig,
    changed_config,
    checked_config,
    preset_config,
    read_config,
)
from flexinspect.records.prompt import SegmentKind


def test_the_first_generated_token_of_small_attends_to_50_keys() -> None:
    small = preset_config("small")
    assert small.prompt_length == 49
    generated = small.segments()[-1]
    assert (generated.start, generated.kind) == (49, SegmentKind.GENERATED)
    assert generated.start + 1 == 50


def test_the_presets_have_the_sizes_of_the_notebook() -> None:
    sizes = {
        name: (c.num_paraphrases, c.tokens_per_paraphrase, c.display_mode)
        for name, c in PRESET_CONFIGS.items()
    }
    assert sizes == {
        "small": (3, 15, "full"),
        "medium": (5, 25, "sampled"),
        "large": (5, 50, "sampled"),
    }


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 3), st.integers(0, 5))
def test_segments_follow_each_other_up_to_the_length(
    n: int, tokens: int, separator: int, generated: int
) -> None:
    config = MaskConfig(n, tokens, separator, generated)
    segments = config.segments()
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert segments[-1].stop == config.length
    kinds = [s.kind for s in segments]
    assert kinds.count(SegmentKind.PARAPHRASE) == n
    assert kinds.count(SegmentKind.SEPARATOR) == (n - 1 if separator else 0)
    for index, segment in enumerate(segments):
        is_separator = segment.kind is SegmentKind.SEPARATOR
        assert segment.owner == (index - 1 if is_separator else index)


def test_toml_and_json_files_give_the_same_configuration(tmp_path: Path) -> None:
    toml, json = tmp_path / "mask.toml", tmp_path / "mask.json"
    toml.write_text('num_paraphrases = 4\nseparator_tokens = 3\ndisplay_mode = "sampled"\n')
    json.write_text('{"num_paraphrases": 4, "separator_tokens": 3, "display_mode": "sampled"}')
    expected = MaskConfig(4, separator_tokens=3, display_mode="sampled")
    assert read_config(toml) == read_config(json) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_paraphrase": 3}, "unknown field `num_paraphrase`"),
        ([3, 15], "Expected `object`, got `array`"),
        ({"num_paraphrases": 0}, "in num_paraphrases: Expected `int` >= 1"),
        ({"num_paraphrases": "3"}, "in num_paraphrases: Expected `int`, got `str`"),
        ({"display_mode": "half"}, "in display_mode: Invalid enum value 'half'"),
        (
            {"num_paraphrases": 9_000_000, "tokens_per_paraphrase": 9},
            "in num_paraphrases: Expected `int` <= 1048576",
        ),
        ({"num_paraphrases": 99_999, "tokens_per_paraphrase": 99}, "the most are 1048576"),
        (
            {"num_paraphrases": 9, "display_mode": "sampled", "max_display_positions": 8},
            "shows 8 positions of 10 segments",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused_with_one_sentence(values: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        checked_config(values, "mask.toml")
    assert error.value.message.startswith("mask.toml")
    assert message in error.value.message


def test_an_unknown_preset_or_key_names_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        preset_config("smal")
    assert error.value.hint == "Did you mean small?"
    with pytest.raises(UsageError) as error:
        changed_config(MaskConfig(), "The flags", token_per_paraphrase=3)
    assert error.value.hint == "Did you mean tokens_per_paraphrase?"


@pytest.mark.parametrize(("name", "text"), [("a.json", "[1]"), ("a.json", "{"), ("a.toml", "x =")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError, match=name):
        read_config(file)


def test_a_full_picture_of_too_many_positions_is_refused() -> None:
    large = MaskConfig(tokens_per_paraphrase=5000)
    with pytest.raises(UsageError, match="A picture of all 15009 positions"):
        large.display_limit()
    assert changed_config(large, "it", display_mode="sampled").display_limit() == 60
    assert MaskConfig().display_limit() == 54
