"""Input tokens that differ from the declared segments are found, in runs of real tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import found_in_case, segments
from support.paths import DEMO, DOCS
from support.planting import of, one, planted, serious
from support.tiny import FAMILIES, ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.prompt.segments import PromptRule

QUESTIONS = [
    "What is the capital of Kenya?",
    "Which city is the capital of Kenya?",
    "Name the capital of Kenya.",
]
NAMES = ["<|eot_id|>", "</s>", "<|im_end|>", "<end_of_turn>"]
Look = Callable[..., list[Finding]]
Span = tuple[int, int, str]


def segments_of(found: Sequence[Finding]) -> list[str]:
    """Return the ids of this family that are no notes."""
    return [finding.id for finding in serious(found) if finding.id.startswith("segments.")]


# -- tokens of a real tokenizer --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO).eval().requires_grad_(False)


@pytest.fixture
def ask(demo: Any, tokenizer: Any, tmp_path: Path) -> Look:
    """Return the findings when the demo model continues the ids by two tokens."""
    numbers = count()

    def look(
        input_ids: Sequence[int], segments: Sequence[Any] = (), **options: Any
    ) -> list[Finding]:
        row = torch.tensor([list(input_ids)])
        options = {"attention_mask": torch.ones_like(row), **options}
        row, mask = options.pop("rows", row), options.pop("mask", None)
        run = partial(demo.generate, row, max_new_tokens=2, do_sample=False, **options)
        options = {"tokenizer": tokenizer, "segments": segments or None, "mask": mask}
        return planted(tmp_path, demo, run, name=f"ask{next(numbers)}", **options)

    return look


@pytest.fixture(scope="module")
def input_ids(tokenizer: Any) -> list[int]:
    """The three questions, a line each, and a cue, with the BOS."""
    return list(tokenizer("\n".join([*QUESTIONS, "Answer:"]))["input_ids"])


@pytest.fixture(scope="module")
def spans(tokenizer: Any) -> list[Span]:
    """Where the questions lie in `input_ids`."""
    out, at = [], 1
    for number, question in enumerate(QUESTIONS, 1):
        stop = at + len(tokenizer.encode(question, add_special_tokens=False))
        out.append((at, stop, f"question {number}"))
        at = stop + 1
    return out


def moved(spans: Sequence[Span], *by: int) -> list[Span]:
    by = by * len(spans) if len(by) == 1 else by
    return [(a + n, b + n, label) for (a, b, label), n in zip(spans, by, strict=True)]


def test_correct_spans_and_texts_are_not_reported(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    for right in (spans, QUESTIONS, [(a, b + 1, label) for a, b, label in spans], spans[:1]):
        assert segments_of(ask(input_ids, right)) == []


def test_spans_counted_without_the_bos_are_one_token_too_early(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    finding = one(ask(input_ids, moved(spans, -1)), "segments.shifted")
    assert finding.sentence.startswith(
        "The 3 declared spans are 1 token too early, as if counted without the "
        'BOS: \'question 1\' includes position 0 "<bos>" and misses position 7 "?";'
    )
    assert finding.evidence["shift"] == 1
    assert finding.evidence["declared"][0] == {"label": "question 1", "start": 0, "stop": 7}
    assert (finding.step, finding.positions) == (0, (0, 7, 8, 16, 17, 23))
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize("n", [2, 3, 5])
def test_spans_counted_with_tokens_that_are_not_there_are_too_late(
    n: int, ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    finding = one(ask(input_ids, moved(spans[:2], n)), "segments.shifted")
    assert finding.evidence["shift"] == -n
    assert f"2 declared spans are {n} tokens too late: " in finding.sentence


def test_spans_that_include_their_line_break_may_be_shifted_too(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    with_break = [(a, b + 1, label) for a, b, label in spans]
    assert one(ask(input_ids, moved(with_break, -1)), "segments.shifted").evidence["shift"] == 1


def test_spans_counted_without_an_instruction_before_them_are_shifted_by_its_length(
    ask: Look, tokenizer: Any, input_ids: list[int], spans: list[Span]
) -> None:
    more = tokenizer.encode("Answer in a word.\n", add_special_tokens=False)
    finding = one(ask([input_ids[0], *more, *input_ids[1:]], spans), "segments.shifted")
    assert finding.evidence["shift"] == len(more)
    assert segments_of(ask([input_ids[0], *more, *input_ids[1:]], moved(spans, len(more)))) == []


def test_spans_counted_without_the_padding_are_shifted_by_it(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    short, long = [0] * 5 + input_ids, input_ids + input_ids[-5:]
    rows = torch.tensor([short, long])
    padded = {"rows": rows, "attention_mask": (rows != 0).long()}
    finding = one(ask(short, spans, **padded), "segments.shifted")
    assert finding.evidence["shift"] == 5
    assert "as if counted without the padding: " in finding.sentence
    assert segments_of(ask(short, moved(spans, 5), **padded)) == []


def test_a_bos_that_was_counted_but_is_missing_gives_both_findings(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    found = ask(input_ids[1:], spans)
    assert one(found, "segments.shifted").evidence["shift"] == -1
    assert "as if a BOS had been counted" in one(found, "segments.shifted").sentence
    assert one(found, "segments.bos-missing").positions == (0,)


def test_spans_that_are_off_more_and_more_drift(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    finding = one(ask(input_ids, moved(spans, 0, 1, 2)), "segments.drift")
    assert finding.severity is Severity.WARNING
    assert finding.evidence["offsets"] == [0, -1, -2]
    assert "'question 2' by -1, 'question 3' by -2" in finding.sentence


def test_pieces_that_are_longer_alone_are_a_note(ask: Look, tokenizer: Any) -> None:
    joined = tokenizer(" ".join([*QUESTIONS, "Answer:"]))["input_ids"]
    finding = one(ask(joined, QUESTIONS), "segments.drift")
    assert finding.severity is Severity.NOTE
    assert finding.evidence["tokens alone and in the prompt"] == [[7, 7], [8, 8], [6, 7]]


SHORT = ["currency, country = Japan", "the money of Japan", "what do people in Japan pay with"]


def joined(tokenizer: Any, texts: Sequence[str], separator: str) -> tuple[list[int], list[Span]]:
    """Return a prompt with a cue, and where each text lies in it with the separator after it."""
    row, spans = [tokenizer.bos_token_id], list[Span]()
    for number, text in enumerate(texts, 1):
        piece = tokenizer.encode(text + separator, add_special_tokens=False)
        spans.append((len(row), len(row) + len(piece), f"question {number}"))
        row += piece
    return row + tokenizer.encode("Answer:", add_special_tokens=False), spans


@pytest.mark.parametrize(
    ("texts", "separator"),
    [(QUESTIONS, "\n"), (QUESTIONS, " "), (QUESTIONS, ""), (SHORT, " "), (SHORT, " | ")],
    ids=["lines", "space", "nothing", "space without marks", "bar"],
)
def test_a_bos_in_the_first_span_is_found_whatever_joins_the_questions(
    texts: list[str], separator: str, ask: Look, tokenizer: Any
) -> None:
    row, right = joined(tokenizer, texts, separator)
    for options in ({}, {"mask": "segment-isolation"}):
        found = ask(row, moved(right, -1), **options)
        finding = one(found, "segments.shifted")
        assert (finding.evidence["shift"], finding.severity) == (1, Severity.WARNING)
        assert finding.sentence.startswith("The 3 declared spans are 1 token too early, as if")
        edges = {edge for start, stop, _ in moved(right, -1) for edge in (start, stop)}
        assert {*finding.positions} == edges
    assert segments_of(ask(row, right)) == []


def test_spaces_that_are_a_part_of_the_next_word_are_in_the_right_segment(
    ask: Look, tokenizer: Any
) -> None:
    row, whole = [tokenizer.bos_token_id], list[Span]()
    for number, text in enumerate(["the money of Japan", " the capital of Kenya", " of Japan"]):
        piece = tokenizer.encode(text, add_special_tokens=False)
        whole.append((len(row) - (number == 0), len(row) + len(piece), f"question {number}"))
        row += piece
    row += tokenizer.encode(" is called", add_special_tokens=False)
    assert segments_of(ask(row, whole)) == []


@pytest.mark.parametrize("separator", ["\n", " "], ids=["lines", "space"])
def test_a_bos_that_is_meant_to_be_in_the_first_segment_is_no_odd_border(
    separator: str, ask: Look, tokenizer: Any
) -> None:
    row, right = joined(tokenizer, QUESTIONS, separator)
    assert segments_of(ask(row, [(0, right[0][1], "question 1"), *right[1:]])) == []
    # If all spans are one early, moving the first border alone would repair nothing.
    assert segments_of(ask(row, moved(right, -1))) == ["segments.shifted"]


def test_one_border_off_its_line_is_named(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    first, (start, stop, label), third = spans
    finding = one(ask(input_ids, [first, (start, stop - 1, label), third]), "segments.odd-border")
    assert finding.positions == (stop - 1,)
    assert finding.sentence == (
        "'question 2' ends before position 16 \"?\", inside a line: the line ends 1 token later. "
        "All other borders are at line or sentence boundaries."
    )


def test_spans_inside_lines_are_not_reported(ask: Look, input_ids: list[int]) -> None:
    for start in range(2, 7):
        inside = [(start, start + 4, "one"), (start + 6, start + 11, "two")]
        assert segments_of(ask(input_ids, inside)) == []


def test_a_text_missing_from_the_prompt_is_named(ask: Look, input_ids: list[int]) -> None:
    finding = one(ask(input_ids, [QUESTIONS[0], ("Where is it?", "lost")]), "segments.not-found")
    assert finding.sentence == (
        "The text of 'lost' is not in the prompt (27 tokens, beginning with "
        '"<bos>What is the capital of Keny"); 1 of 2 declared pieces were found.'
    )


def test_another_prompt_after_one_that_had_all_pieces_is_a_note(
    demo: Any, tokenizer: Any, input_ids: list[int], tmp_path: Path
) -> None:
    def run() -> None:
        for row in (input_ids, tokenizer("Something else.")["input_ids"]):
            demo(torch.tensor([row]))

    found = planted(tmp_path, demo, run, tokenizer=tokenizer, segments=QUESTIONS)
    finding = one(found, "segments.not-found")
    assert (finding.generation, finding.severity) == (1, Severity.NOTE)


def test_a_prompt_truncated_at_its_end_or_beginning_is_reported(
    ask: Look, input_ids: list[int], spans: list[Span]
) -> None:
    end = one(ask(input_ids[:-12], QUESTIONS), "segments.truncated")
    assert "ends inside 'Which city is the capit…', at position 14 \" of\"" in end.sentence
    assert end.positions == (14,)
    left = one(ask(input_ids[10:], QUESTIONS), "segments.truncated")
    assert "begins inside 'Which city is the capit…'" in left.sentence
    by_span = one(ask(input_ids[:-12], spans), "segments.truncated")
    assert "2 of its 8 positions are missing; 'question 3' is missing" in by_span.sentence


def test_spans_counted_in_characters_are_recognized(ask: Look, input_ids: list[int]) -> None:
    at, characters = 0, []
    for question in QUESTIONS:
        characters.append((at, at + len(question), question[:4]))
        at += len(question) + 1
    finding = one(ask(input_ids, characters), "segments.truncated")
    assert "as if counted in characters." in finding.sentence


def test_pieces_in_later_chunks_are_awaited(
    demo: Any, tokenizer: Any, input_ids: list[int], spans: list[Span], tmp_path: Path
) -> None:
    def run() -> None:
        cache = DynamicCache(config=demo.config)
        for part in (input_ids[:12], input_ids[12:], input_ids[:1]):
            demo(torch.tensor([part]), past_key_values=cache, use_cache=True)

    for number, right in enumerate((QUESTIONS, spans)):
        options = {"tokenizer": tokenizer, "segments": right, "name": f"chunks{number}"}
        assert segments_of(planted(tmp_path, demo, run, **options)) == []


def test_pieces_that_share_tokens_are_reported(
    ask: Look, tokenizer: Any, input_ids: list[int]
) -> None:
    found = ask(input_ids, ["the capital of Kenya?\n", "Kenya?\nWhich city"])
    finding = one(found, "segments.overlap")
    assert finding.evidence["segments"] == ["the capital of Kenya?\n", "Kenya?\nWhich city"]
    assert finding.positions == (6, 7, 8)
    assert segments_of(ask(input_ids, ["the capital of Kenya?\n", "Which city"])) == []


def test_a_text_in_several_places_is_a_note(ask: Look, input_ids: list[int]) -> None:
    finding = one(ask(input_ids, ["capital of Kenya"]), "segments.ambiguous")
    assert (finding.severity, finding.evidence["places"]) == (Severity.NOTE, 3)
    assert of(ask(input_ids, ["capital of Kenya"] * 3), "segments.ambiguous") == []


def test_words_between_pieces_are_a_note(ask: Look, input_ids: list[int]) -> None:
    finding = one(ask(input_ids, [QUESTIONS[0], QUESTIONS[2]]), "segments.uncovered")
    assert finding.severity is Severity.NOTE
    assert '"Which city is the capital of Ken' in finding.sentence
    assert of(ask(input_ids, QUESTIONS), "segments.uncovered") == []


def test_a_missing_and_an_extra_bos_are_found(ask: Look, input_ids: list[int]) -> None:
    missing = one(ask(input_ids[1:]), "segments.bos-missing")
    assert 'begins with position 0 "What", without the BOS (id 1)' in missing.sentence
    doubled = one(ask([1, *input_ids]), "segments.bos-doubled")
    assert (doubled.positions, doubled.severity) == ((0, 1), Severity.WARNING)
    inside = one(ask([*input_ids[:8], 1, *input_ids[8:]]), "segments.bos-doubled")
    assert (inside.positions, inside.severity) == ((8,), Severity.NOTE)
    assert segments_of(ask(input_ids)) == []


def test_padding_without_a_padding_mask_is_no_missing_bos(ask: Look, input_ids: list[int]) -> None:
    assert segments_of(ask([0, 0, 0, *input_ids])) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_special_token_of_another_model_is_found_in_pieces(
    name: str, ask: Look, tokenizer: Any
) -> None:
    input_ids = tokenizer(f"What is it?{name}\nAnswer:")["input_ids"]
    finding = one(ask(input_ids), "segments.special-as-text")
    assert finding.evidence["token"] == name
    assert f'"{name}" (unknown to this tokenizer) were encoded as ' in finding.sentence


def test_an_own_special_token_is_found_in_pieces_and_whole_it_is_right(
    ask: Look, tokenizer: Any
) -> None:
    split = tokenizer.encode("Be brief.<eos>\nGo on.", split_special_tokens=True)
    finding = one(ask([1, *split]), "segments.special-as-text")
    assert finding.evidence == {"token": "<eos>", "id": 2, "times": 1}
    assert (
        segments_of(ask(tokenizer("Be brief.<eos>\nGo on: a < b, <p>x</p> <s>y</s>")["input_ids"]))
        == []
    )


# -- ids alone -------------------------------------------------------------------------------------

N = 15
RIGHT: list[Span] = [(1, 7, "one"), (9, 15, "two")]


class Cells:
    """An attention of the user's own: flex with the cells (rows, keys) of each layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}
        self.other = torch.ones(1, 1, dtype=torch.bool)

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        cells = self.by_layer.get(module.layer_idx, self.other)
        heads = len(cells) if cells.dim() == 3 else None
        whole = cells if cells.dim() == 3 else cells[None]
        last = len(whole) - 1

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return whole[h.clamp(max=last), q_idx, kv_idx]

        mask = create_block_mask(mask_mod, None, heads, q.shape[2], k.shape[2], device="cpu")
        out = flex_attention(q, k, v, block_mask=mask, scale=kwargs["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def cells() -> Cells:
    made = Cells()
    AttentionInterface.register("cells", made)
    return made


@pytest.fixture
def llama(cells: Cells) -> Any:
    model = make_model("llama")
    model.set_attn_implementation("cells")
    return model


def isolated(spans: Sequence[tuple[int, int]], n: int = N, reads: int | None = None) -> Tensor:
    """Return causal cells within each span; rows from `reads` (else the end) on see all before."""
    same = torch.zeros(n, n, dtype=torch.bool)
    for start, stop in spans:
        same[start:stop, start:stop] = True
    same[n if reads is None else reads :] = True
    return same & torch.ones(n, n, dtype=torch.bool).tril()


def row(*, bos: bool = True, n: int = N) -> Tensor:
    some = torch.tensor([ids(n, 7)])
    some[0, 0] = 1 if bos else some[0, 0]
    return some


def test_a_mask_built_from_spans_without_the_bos_is_found_by_its_borders(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    cells.other = isolated([(0, 6), (8, 14)], reads=14)
    finding = one(
        planted(tmp_path, llama, lambda: llama(row()), segments=RIGHT), "segments.shifted"
    )
    assert finding.sentence.startswith(
        "The borders of the executed mask are 1 token early, as if counted without the BOS: in all "
        "3 layers the last token of 'one' (position 6"
    )
    assert (finding.positions, finding.layers) == ((6, 14), (0, 1, 2))
    assert (finding.evidence["shift"], finding.severity) == (1, Severity.WARNING)


def test_a_mask_that_has_the_declared_borders_is_right(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    for number, right in enumerate(
        (
            isolated([(1, 7), (9, 15)]),
            isolated([(1, 9), (9, 15)]),
            isolated([(0, 7), (7, 15)]),
            isolated([(1, 7), (9, 14)], reads=15),  # a border of one alone is no shift
        )
    ):
        cells.other = right
        run = partial(llama, row())
        found = planted(tmp_path, llama, run, name=str(number), segments=RIGHT)
        assert segments_of(found) == []


def test_the_same_wrong_spans_declared_are_found_by_the_bos_in_them(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    wrong = [(0, 6, "one"), (8, 14, "two")]
    for number, mask in enumerate(
        (isolated([(0, 6), (8, 14)], reads=14), isolated([(1, 7), (9, 15)]))
    ):
        cells.other = mask
        run = partial(llama, row())
        finding = one(
            planted(tmp_path, llama, run, name=str(number), segments=wrong), "segments.shifted"
        )
        assert finding.evidence["shift"] == 1
        assert finding.positions == (0, 6, 8, 14)
    cells.other = isolated([(0, 6), (8, 14)], reads=14)
    found = planted(tmp_path, llama, lambda: llama(row(bos=False)), segments=wrong, name="clean")
    assert segments_of(found) == []


LISTED: list[Span] = [(1, 7, "one"), (7, 12, "two"), (12, 19, "three")]
N_LISTED = 23  # the last 4 are a cue


def look_at_lists(
    llama: Any, tmp_path: Path, spans: Sequence[Span], lists: Sequence[tuple[int, int]], name: str
) -> list[Finding]:
    """Return the findings of a program that holds these lists and declared these spans."""
    prompt = row(n=N_LISTED)
    pieces = [prompt[0, start:stop].tolist() for start, stop in lists]
    options = {"segments": spans, "mask": "segment-isolation", "name": name}
    found = planted(tmp_path, llama, lambda: llama(prompt), **options)
    assert pieces
    return found


def test_wrong_spans_that_the_mask_has_too_are_found_by_the_lists_of_the_program(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    """Neither words nor the end of the prompt tell where the segments are."""
    lists = [(start, stop) for start, stop, _ in LISTED]
    wrong = moved(LISTED, -1)
    cells.other = isolated([(a, b) for a, b, _ in wrong], N_LISTED, reads=wrong[-1][1])
    found = look_at_lists(llama, tmp_path, wrong, lists, "all")
    finding = one(found, "segments.shifted")
    assert (finding.severity, finding.evidence["shift"]) == (Severity.WARNING, 1)
    assert finding.evidence["reported_by"] == "lists"
    assert finding.positions == (0, 6, 11, 18)
    assert finding.sentence.endswith(
        "Shifted by +1, they begin with lists of token ids of your program (pieces[0], pieces[1] "
        "and pieces[2])."
    )
    one_list = one(look_at_lists(llama, tmp_path, wrong, lists[-1:], "last"), "segments.shifted")
    assert one_list.sentence.endswith(
        "they exclude the BOS, and one is pieces[0], a list of token ids of your program."
    )


def test_a_first_span_that_begins_after_the_bos_stays_where_it_is(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    """So `flexinspect declare --move 0` writes the segments of a mask that is one token early."""
    wrong = [(1, 6, "one"), *moved(LISTED[1:], -1)]
    cells.other = isolated([(a, b) for a, b, _ in wrong], N_LISTED, reads=wrong[-1][1])
    lists = [(start, stop) for start, stop, _ in LISTED]
    finding = one(look_at_lists(llama, tmp_path, wrong, lists, "early"), "segments.shifted")
    assert finding.sentence.startswith(
        "All borders of the 3 declared spans but the first are 1 token too early, as if counted "
        "without the BOS: 'one' misses position 6"
    )
    assert finding.positions == (6, 11, 18)


def test_spans_that_begin_with_lists_of_the_program_are_right(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    lists = [(start, stop) for start, stop, _ in LISTED]
    with_bos = [(0, 7, "one"), *LISTED[1:]]
    inner = [(start + 1, stop - 1, label) for start, stop, label in LISTED]
    for name, spans, reads in (("right", LISTED, 19), ("bos", with_bos, 19), ("in", inner, 18)):
        cells.other = isolated([(a, b) for a, b, _ in spans], N_LISTED, reads=reads)
        assert segments_of(look_at_lists(llama, tmp_path, spans, lists, name)) == []


def test_one_layer_alone_is_named_and_a_declared_mask_makes_it_an_error(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    cells.other = isolated([(1, 7), (9, 15)])
    cells.by_layer[1] = isolated([(1, 4), (6, 15)])
    found = planted(tmp_path, llama, lambda: llama(row()), segments=RIGHT, mask="segment-isolation")
    finding = one(found, "segments.shifted")
    assert (finding.layer, finding.layers, finding.severity) == (1, (), Severity.ERROR)
    assert finding.evidence["shift"] == 3
    assert ": in layer 1 the last 3 tokens" in finding.sentence
    assert "last 3 tokens of 'one' (from position 4" in finding.sentence


def test_borders_that_are_off_inside_of_separators_are_found_when_a_mask_was_declared(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    declared = [(1, 5, "one"), (7, 11, "two"), (13, 17, "three"), (19, 21, "cue")]
    look = partial(planted, tmp_path, llama, lambda: llama(row(n=21)), segments=declared)
    cells.other = isolated([(0, 6), (6, 12), (12, 18)], 21, reads=18)
    found = look(name="off", mask="segment-isolation")
    assert of(look(name="assumed"), "segments.shifted") == []
    finding = one(found, "segments.shifted")
    assert (finding.evidence["shift"], finding.severity) == (1, Severity.ERROR)
    assert finding.positions == (6, 12, 18)
    cells.other = isolated([(0, 7), (7, 13), (13, 19)], 21, reads=19)
    assert segments_of(look(name="right", mask="segment-isolation")) == []


def test_some_heads_alone_are_named(llama: Any, cells: Cells, tmp_path: Path) -> None:
    right, late = isolated([(1, 7), (9, 15)]), isolated([(1, 9), (11, 15)])
    cells.other = torch.stack((right, right, late, right))
    finding = one(
        planted(tmp_path, llama, lambda: llama(row()), segments=RIGHT), "segments.shifted"
    )
    assert (finding.head, finding.evidence["shift"]) == (2, -2)
    assert "all 3 layers (1 head, first 2)" in finding.sentence
    assert "the first 2 tokens of 'two' (from position 9" in finding.sentence


def test_a_mask_in_a_later_step_without_a_cache_is_found_once(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    def run() -> None:
        whole = row()
        for step in range(4):
            n = N + step
            spans = [(1, 7), (9, 15)] if step < 2 else [(1, 6), (8, 14)]
            cells.other = isolated(spans, n, reads=spans[-1][1])
            chosen = llama(whole, use_cache=False).logits[:, -1:].argmax(-1)
            whole = torch.cat((whole, chosen), 1)

    found = planted(tmp_path, llama, run, segments=RIGHT)
    finding = one(found, "segments.shifted")
    assert (finding.step, finding.times, finding.evidence["shift"]) == (2, 2, 1)


def test_a_mask_whose_borders_go_astray_more_and_more_drifts(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    declared = [(1, 6, "one"), (7, 12, "two"), (13, 18, "three"), (19, 24, "four")]
    cells.other = isolated([(1, 8), (8, 15), (15, 25)], 25)
    found = planted(tmp_path, llama, lambda: llama(row(n=25)), segments=declared[:3])
    drift = one(found, "segments.drift")
    assert drift.evidence["offsets"] == [-1, -2]
    cells.other = isolated([(1, 7), (7, 13), (13, 19), (19, 25)], 25)
    run = partial(llama, row(n=25))
    assert segments_of(planted(tmp_path, llama, run, segments=declared, name="clean")) == []


def test_documents_without_a_border_between_them_are_found(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    documents = [(0, 4, "document 1"), (4, 9, "document 2"), (9, 15, "document 3")]
    look = partial(planted, tmp_path, llama, lambda: llama(row()), segments=documents)
    cells.other = isolated([(0, 15)])
    finding = one(look(name="one"), "segments.merged")
    assert finding.sentence.startswith(
        "The executed mask is one block in all 3 layers, but 3 segments were declared; position 4"
    )
    assert "so no EOS separates them" in finding.sentence
    assert (finding.positions, finding.severity) == ((4, 9), Severity.WARNING)
    cells.other = isolated([(0, 4), (4, 15)])
    part = one(look(name="two", mask="document"), "segments.merged")
    assert (part.positions, part.severity) == ((9,), Severity.ERROR)
    assert "has 2 blocks in all 3 layers, but 3 segments were declared" in part.sentence
    cells.other = isolated([(0, 4), (4, 9), (9, 15)])
    assert segments_of(look(name="three", mask="document")) == []
    cells.other = isolated([(0, 15)])
    assert segments_of(look(name="four", mask="causal")) == []


def test_equal_ids_between_spans_tell_a_shift_without_any_words(
    llama: Any, cells: Cells, tmp_path: Path
) -> None:
    input_ids = row(n=24)
    input_ids[0, [6, 12, 18]] = 9
    cells.other = isolated([(0, 24)], 24)
    declared = [(1, 6, "one"), (7, 12, "two"), (13, 18, "three")]
    wrong = moved(declared, -1)
    look = partial(planted, tmp_path, llama, lambda: llama(input_ids), mask="causal")
    finding = one(look(name="wrong", segments=wrong), "segments.shifted")
    assert (finding.evidence["shift"], finding.evidence["reported_by"]) == (1, "gaps")
    assert segments_of(look(name="right", segments=declared)) == []


def test_padding_inside_a_piece_is_found(llama: Any, tmp_path: Path) -> None:
    llama.set_attn_implementation("sdpa")
    input_ids = torch.cat((torch.zeros(1, 4, dtype=torch.long), row()), 1).repeat(2, 1)
    input_ids[1] = torch.tensor(ids(19, 8))
    run = partial(llama, input_ids, attention_mask=(input_ids != 0).long())
    look = partial(planted, tmp_path, llama, run)
    finding = one(
        look(name="a", segments=[(2, 9, "one"), (10, 15, "two")]), "segments.padding-inside"
    )
    assert finding.positions == (2, 3)
    assert "'one' contains 2 padding tokens" in finding.sentence
    assert segments_of(look(name="b", segments=[(5, 11, "one"), (13, 19, "two")])) == []
    right = partial(llama, torch.cat((row(), torch.zeros(1, 3, dtype=torch.long)), 1))
    at_end = [(1, 7, "one"), (9, 17, "two")]
    finding = one(
        planted(tmp_path, llama, right, name="c", segments=at_end), "segments.padding-inside"
    )
    assert finding.positions == (15, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_generation_of_all_families_is_clean(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    input_ids = torch.tensor([[1, *ids(23, 3)]])
    segments = [(1, 7, "one"), (8, 14, "two"), (15, 20, "three")]
    run = partial(
        model.generate, input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False
    )
    for number, options in enumerate(({}, {"use_cache": False}, {"num_beams": 2})):
        again = partial(run, max_new_tokens=3, **options)
        found = planted(tmp_path, model, again, name=str(number), segments=segments)
        assert segments_of(found) == []


# -- the cases -------------------------------------------------------------------------------------


def test_the_case_of_the_bos_is_found_from_its_segments_and_its_repair_is_clean() -> None:
    found = found_in_case("w01_bos_shift", segments((1, 7), (9, 15)))
    shifted = of(found, "segments.shifted")
    assert [finding.generation for finding in shifted] == [0, 1]
    assert all(finding.evidence["shift"] == 1 for finding in shifted)
    assert all(finding.positions == (6, 14) for finding in shifted)
    assert segments_of([one for one in found if one.generation > 1]) == []


def test_the_case_of_the_missing_eos_is_found_and_its_repair_is_clean() -> None:
    found = found_in_case("w04_missing_eos", segments((0, 4), (4, 7), (7, 11)))
    merged = [finding for finding in of(found, "segments.merged") if finding.generation < 2]
    assert [finding.generation for finding in merged] == [0, 1]
    assert "one block in all 2 layers, but 3 segments were declared" in merged[0].sentence
    right = found_in_case("w04_missing_eos", segments((0, 5), (5, 9), (9, 14)))
    assert segments_of([one for one in right if one.generation > 1]) == []


# -- pages -----------------------------------------------------------------------------------------


def test_each_finding_kind_is_complete_and_has_a_page() -> None:
    pages = DOCS / "findings"
    for name, kind in PromptRule.findings.items():
        assert all((kind.meaning, kind.why, kind.confirm, kind.fix, kind.query)), name
        assert (pages / f"{name}.md").is_file(), name
