"""Position ids that do not continue are found; ids that are only shifted are not reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import one, planted, serious
from support.tiny import FAMILIES, ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, DynamicCache

from flexinspect.records.finding import Finding, Severity

SEGMENTS = [(1, 5, "paraphrase 1"), (5, 9, "paraphrase 2")]


def prompt(n: int = 9, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


def greedy(model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 5, **options}
    found: Tensor = model.generate(input_ids, **{"do_sample": False, **options})
    return found


def decode(
    model: Any,
    input_ids: Tensor,
    positions: Callable[[int, int], Sequence[Sequence[int]] | None],
    n: int = 4,
    mask: Tensor | None = None,
) -> None:
    """Run a loop of a user's own; `positions(start, rows)` are the ids of each step."""
    cache = DynamicCache(config=model.config)
    for _ in range(n):
        position_ids = positions(cache.get_seq_length(), input_ids.shape[1])
        options = {} if position_ids is None else {"position_ids": torch.tensor(position_ids)}
        if mask is not None:
            options["attention_mask"] = mask
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        input_ids = model(input_ids, past_key_values=cache, **options).logits[:, -1:].argmax(-1)


def contiguous(start: int, rows: int, shift: int = 0) -> list[list[int]]:
    return [list(range(start + shift, start + rows + shift))]


def about_positions(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.id.startswith("positions.")]


def only(found: list[Finding]) -> Finding:
    (finding,) = about_positions(found)
    return finding


# -- decode steps that do not continue -------------------------------------------------------------


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_decode_positions_that_restart_at_0_are_reported_once(tmp_path: Path, level: str) -> None:
    """The id of a row is taken for its number within the step."""
    model = make_model("llama")
    run = lambda: decode(model, prompt(), lambda start, rows: contiguous(0, rows))  # noqa: E731
    found = planted(tmp_path, model, run, level=level)
    first = only(found)
    assert (first.id, first.times, first.last_step) == ("positions.restart", 3, 3)
    assert (first.severity, first.step, first.positions) == (Severity.ERROR, 1, (9,))
    assert first.sentence.startswith("Position ids restart at 0 in step 1 (position 9 ")
    assert first.sentence.endswith("9 was expected, and the cache holds 9 keys.")


def test_a_new_text_on_the_cache_of_the_one_before_is_named(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        for n, seed in ((9, 3), (7, 4)):
            model(prompt(n, seed), past_key_values=cache, position_ids=torch.arange(n)[None])

    finding = only(planted(tmp_path, model, run))
    assert (finding.id, finding.severity) == ("positions.restart", Severity.ERROR)
    assert finding.sentence.endswith(
        "9 was expected, and the cache holds 9 keys: a new text seems to begin on the cache of the "
        "one before."
    )


def test_the_first_decoded_token_at_the_last_prompt_id_is_a_duplicate(tmp_path: Path) -> None:
    model = make_model("qwen2")

    def late(start: int, rows: int) -> list[list[int]]:
        return contiguous(start, rows, -1 if start else 0)

    finding = only(planted(tmp_path, model, lambda: decode(model, prompt(), late)))
    assert (finding.id, finding.severity, finding.step) == (
        "positions.duplicate",
        Severity.WARNING,
        1,
    )
    assert finding.sentence.startswith("Position id 8 is used twice, again in step 1")


def test_ids_that_do_not_advance_are_reported_once_and_counted(tmp_path: Path) -> None:
    model = make_model("llama")

    def still(start: int, rows: int) -> list[list[int]]:
        return contiguous(0, rows) if rows > 1 else [[8]]

    finding = only(planted(tmp_path, model, lambda: decode(model, prompt(), still, 5)))
    assert (finding.id, finding.times, finding.last_step) == ("positions.duplicate", 4, 4)


def test_a_jump_in_the_middle_of_an_answer_is_located(tmp_path: Path) -> None:
    model = make_model("phi3")

    def jumping(start: int, rows: int) -> list[list[int]]:
        return contiguous(start, rows, 7 if start > 10 else 0)

    finding = only(planted(tmp_path, model, lambda: decode(model, prompt(), jumping, 5)))
    assert (finding.id, finding.step, finding.positions) == ("positions.jump", 3, (11,))
    assert "jump from 10 to 18 in step 3" in finding.sentence


def test_own_ids_for_the_prompt_only_are_reported_at_the_first_decode_step(tmp_path: Path) -> None:
    """The paraphrases restart at 1; the model creates the ids of decode steps."""
    model = make_model("llama")

    def prompt_only(start: int, rows: int) -> list[list[int]] | None:
        return None if start else [[0, 1, 2, 3, 4, 1, 2, 3, 4]]

    run = lambda: decode(model, prompt(), prompt_only)  # noqa: E731
    finding = only(planted(tmp_path, model, run, segments=SEGMENTS))
    assert (finding.id, finding.severity, finding.step) == ("positions.jump", Severity.WARNING, 1)
    assert finding.sentence.startswith("Position ids jump from 4 to 9 in step 1")
    assert finding.sentence.endswith("they count the cached keys, unlike the prompt's ids.")


def test_the_same_ids_of_the_prompt_with_decode_steps_that_continue_are_correct(
    tmp_path: Path,
) -> None:
    model = make_model("llama")

    def both(start: int, rows: int) -> list[list[int]]:
        return [[start - 4]] if start else [[0, 1, 2, 3, 4, 1, 2, 3, 4]]

    run = lambda: decode(model, prompt(), both)  # noqa: E731
    assert about_positions(planted(tmp_path, model, run, segments=SEGMENTS)) == []


# -- a prompt whose ids do not rise ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("position_ids", "finding_id", "severity", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 1, 2, 3], "restart", Severity.WARNING, "restart at 1 after 5, at posi"),
        ([0, 1, 2, 2, 3, 4, 5, 6, 7], "duplicate", Severity.WARNING, "id 2 is used twice, again a"),
        ([0, 1, 2, 3, 4, 5, 6, 9, 10], "jump", Severity.WARNING, "jump from 6 to 9 at position 7"),
    ],
)
def test_ids_that_break_inside_a_segment_are_reported(
    tmp_path: Path, position_ids: list[int], finding_id: str, severity: Severity, expected: str
) -> None:
    model = make_model("llama")
    run = lambda: model(prompt(), position_ids=torch.tensor([position_ids]), use_cache=False)  # noqa: E731
    finding = only(planted(tmp_path, model, run, segments=SEGMENTS))
    assert (finding.id, finding.severity) == (f"positions.{finding_id}", severity)
    assert expected in finding.sentence
    assert "inside paraphrase" in finding.sentence


def test_ids_that_restart_one_token_late_name_the_segment(tmp_path: Path) -> None:
    """Spans were counted without BOS."""
    model = make_model("gpt_neox")
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2, 3]])
    run = lambda: model(prompt(), position_ids=position_ids, use_cache=False)  # noqa: E731
    finding = only(planted(tmp_path, model, run, segments=SEGMENTS))
    assert (finding.id, finding.positions) == ("positions.restart", (6,))
    assert "inside paraphrase 2" in finding.sentence


def test_packed_documents_without_declared_segments_are_only_notes(tmp_path: Path) -> None:
    model = make_model("llama")
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    run = lambda: model(prompt(), position_ids=position_ids, use_cache=False)  # noqa: E731
    found = planted(tmp_path, model, run)
    assert serious(found) == []
    assert only(found).id == "positions.restart"


# -- padding ---------------------------------------------------------------------------------------


def padded(side: str = "left") -> tuple[Tensor, Tensor]:
    short, long = list(ids(5, 1)), list(ids(9, 2))
    pads = [0] * 4
    input_ids = torch.tensor([pads + short if side == "left" else short + pads, long])
    return input_ids, (input_ids != 0).long()


def test_decode_steps_that_count_the_padding_are_reported(tmp_path: Path) -> None:
    """The prompt's ids leave the padding out, those of the decode steps are left to the model."""
    model = make_model("llama")
    input_ids, mask = padded()

    def prompt_only(start: int, rows: int) -> list[list[int]] | None:
        return None if start else (mask.cumsum(1) - 1).clamp(min=0).tolist()

    finding = only(planted(tmp_path, model, lambda: decode(model, input_ids, prompt_only, 4, mask)))
    assert (finding.id, finding.severity, finding.step) == (
        "positions.padding",
        Severity.WARNING,
        1,
    )
    assert finding.sentence.startswith("In batch row 0, position ids go from 4 to 9 in step 1")
    assert "skip its 4 padding tokens" in finding.sentence


def test_a_padded_row_that_is_not_the_first_is_named(tmp_path: Path) -> None:
    model = make_model("qwen3")
    input_ids, mask = (part.flip(0) for part in padded())

    def prompt_only(start: int, rows: int) -> list[list[int]] | None:
        return None if start else (mask.cumsum(1) - 1).clamp(min=0).tolist()

    run = lambda: decode(model, input_ids, prompt_only, 4, mask)  # noqa: E731
    finding = only(planted(tmp_path, model, run, level="basic"))
    assert (finding.id, finding.evidence["batch_row"]) == ("positions.padding", 1)
    assert "in batch row 1, position ids go from 4 to 9" in finding.sentence.lower()


def test_ids_made_from_a_mask_of_the_other_side_are_reported(tmp_path: Path) -> None:
    model = make_model("llama")
    input_ids, mask = padded()
    wrong = (mask.flip(1).cumsum(1) - 1).clamp(min=0)
    run = lambda: model(input_ids, attention_mask=mask, position_ids=wrong)  # noqa: E731
    finding = only(planted(tmp_path, model, run))
    assert (finding.id, finding.severity) == ("positions.padding", Severity.WARNING)
    assert "4 of the 4 steps between real tokens are not 1" in finding.sentence
    assert finding.sentence.startswith("In batch row 0")


def test_padding_that_is_counted_throughout_is_a_note(tmp_path: Path) -> None:
    """Rotary embeddings do not see it."""
    model = make_model("llama")
    input_ids, mask = padded()
    found = planted(tmp_path, model, lambda: decode(model, input_ids, lambda *_: None, 4, mask))
    assert serious(found) == []
    finding = only(found)
    assert (finding.id, finding.severity, finding.positions) == (
        "positions.padding",
        Severity.NOTE,
        (4,),
    )
    assert "has id 4: 4 padding tokens before it are counted" in finding.sentence


# -- isolated segments without restarted ids -------------------------------------------------------


def isolated(rows: int, keys: int) -> Any:
    owner = torch.tensor([-1, 0, 0, 0, 0, 1, 1, 1, 1])
    off = keys - rows

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        row, key = owner[(i + off).clamp(max=8)], owner[j.clamp(max=8)]
        return (j <= i + off) & ((key < 0) | (i + off > 8) | (row == key))

    return create_block_mask(mask_mod, None, None, rows, keys, "cpu")


@pytest.fixture
def isolating() -> Any:
    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        block = isolated(q.shape[2], k.shape[2])
        out = flex_attention(q, k, v, block_mask=block, scale=kw["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("isolating", attention)
    model = make_model("llama")
    model.set_attn_implementation("isolating")
    yield model
    AttentionInterface._global_mapping.pop("isolating")


def test_isolated_segments_without_restarted_ids_are_a_note(tmp_path: Path, isolating: Any) -> None:
    """Reported at the first row that sees both of them."""
    run = lambda: decode(isolating, prompt(), lambda *_: None)  # noqa: E731
    found = planted(tmp_path, isolating, run, segments=SEGMENTS)
    finding = only(found)
    assert (finding.id, finding.severity) == ("positions.not-reset", Severity.NOTE)
    assert (finding.step, finding.positions) == (1, (5,))
    assert finding.sentence.startswith("Position ids are not restarted at paraphrase 2: it begins ")
    assert "a modeling choice, not a fault" in finding.sentence
    assert "order" in finding.confirm


def test_isolated_segments_with_restarted_ids_are_not_reported(
    tmp_path: Path, isolating: Any
) -> None:
    def restarted(start: int, rows: int) -> list[list[int]]:
        return [[start - 4]] if start else [[0, 1, 2, 3, 4, 1, 2, 3, 4]]

    run = lambda: decode(isolating, prompt(), restarted)  # noqa: E731
    assert about_positions(planted(tmp_path, isolating, run, segments=SEGMENTS)) == []


def test_documents_that_no_row_sees_together_have_no_order(tmp_path: Path, isolating: Any) -> None:
    run = lambda: isolating(prompt(), use_cache=False)  # noqa: E731
    assert about_positions(planted(tmp_path, isolating, run, segments=SEGMENTS)) == []


def test_segments_that_attend_to_each_other_need_no_restarted_ids(tmp_path: Path) -> None:
    model = make_model("llama")
    run = lambda: greedy(model, prompt())  # noqa: E731
    found = planted(tmp_path, model, run, segments=SEGMENTS)
    assert about_positions(found) == []


# -- correct ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1, 100])
def test_ids_that_are_all_shifted_are_not_reported(tmp_path: Path, shift: int) -> None:
    model = make_model("llama")
    shifted = lambda start, rows: contiguous(start, rows, shift)  # noqa: E731
    assert planted(tmp_path, model, lambda: decode(model, prompt(), shifted)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_of_all_families_are_not_reported(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    input_ids, mask = padded()
    found = planted(tmp_path, model, lambda: greedy(model, input_ids, attention_mask=mask))
    assert serious(found) == about_positions(found) == []


CORRECT: dict[str, Callable[[Any], Any]] = {
    "generate": lambda m: greedy(m, prompt()),
    "static": lambda m: greedy(m, prompt(), cache_implementation="static", disable_compile=True),
    "beams": lambda m: greedy(m, prompt(), num_beams=3),
    "padded beams": lambda m: greedy(m, padded()[0], attention_mask=padded()[1], num_beams=2),
    "prompt lookup": lambda m: greedy(m, prompt(), prompt_lookup_num_tokens=3),
    "no cache": lambda m: greedy(m, prompt(), use_cache=False, max_new_tokens=2),
    "right padding": lambda m: m(padded("right")[0], attention_mask=padded("right")[1]),
    "ids that stay the same in right padding": lambda m: m(
        padded("right")[0],
        attention_mask=padded("right")[1],
        position_ids=padded("right")[1].cumsum(1) - 1,
    ),
    "embeddings": lambda m: m(inputs_embeds=torch.ones(2, 3, 48)),
    "own loop": lambda m: decode(m, prompt(), lambda *_: None),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_positions_are_not_reported(tmp_path: Path, name: str) -> None:
    model = make_model("llama")
    found = planted(tmp_path, model, lambda: CORRECT[name](model), level="basic")
    assert about_positions(found) == []


def test_assisted_generation_is_not_reported(tmp_path: Path) -> None:
    model, assistant = make_model("llama"), make_model("llama", num_hidden_layers=1)
    run = lambda: greedy(model, prompt(), assistant_model=assistant)  # noqa: E731
    assert about_positions(planted(tmp_path, model, run)) == []


def test_chunks_turns_and_crops_are_not_reported(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        for part in prompt(14).split(5, dim=1):
            model(part, past_key_values=cache)
        cache.crop(-3)
        model(prompt(4, 8), past_key_values=cache)

    assert about_positions(planted(tmp_path, model, run)) == []


def test_a_filled_cache_with_correct_ids_is_not_reported_but_with_ids_from_0_it_is(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    cache = DynamicCache(config=model.config)
    model(prompt(), past_key_values=cache)
    run = lambda: model(prompt(1), past_key_values=cache)  # noqa: E731
    assert planted(tmp_path, model, run, name="right") == []
    position_ids = torch.tensor([[0]])
    wrong = lambda: model(prompt(1), past_key_values=cache, position_ids=position_ids)  # noqa: E731
    found = planted(tmp_path, model, wrong, name="wrong")
    assert "begin at 0 in step 0, on a cache of 10 keys" in one(found, "positions.restart").sentence
