"""Which tokens a program's forwards processed, and where each row stands in the committed text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor

from flexinspect_hooks.audit.evidence.beams import followed, lineage, parents
from flexinspect_hooks.audit.evidence.step_evidence import StepEvidence
from flexinspect_hooks.audit.forward.encoder_inputs import EncoderInput


class AuditedStep(Struct):
    """One forward: `kept` indexes the rows of its evidence, which stand at `positions`.

    `row` is the batch row of the sequence in this step; a beam search reorders rows.
    """

    evidence: StepEvidence
    kept: Tensor
    positions: Tensor
    row: int = 0

    @property
    def first_row(self) -> int:
        """The position of the step's first kept row."""
        return int(self.positions[0])


class AuditedSequence(Struct):
    """The tokens of one batch row without padding, and the steps that processed them.

    `padding` are ids before the text that the program did not mask. `input_rows` are the input
    columns of the tokens. `passed` are the position ids that the program passed, one per token,
    None if it passed none. `stopped` says why later steps are not judged. `crops` are steps before
    which the cache had become shorter; its newest rows are taken to be the ones that are missing.
    With `losses`, (step, keys that are left, tokens before it) in order, its rows are all kept
    instead, and some of the keys before the newest ones are missing. `has_default_positions` says
    that the program passed no position ids, so that the model made them from the length of the
    cache. `encoder` is what the encoder of the model reads.
    """

    batch: int
    ids: tuple[int, ...] = ()
    steps: list[AuditedStep] = field(default_factory=list)
    padding: tuple[int, ...] = ()
    input_rows: tuple[int, ...] = ()
    passed: tuple[int, ...] | None = None
    stopped: str = ""
    crops: list[tuple[int, int]] = field(default_factory=list)
    losses: list[tuple[int, int, int]] = field(default_factory=list)
    has_default_positions: bool = True
    encoder: EncoderInput | None = None

    @property
    def n_lost(self) -> int:
        """How many keys fewer than tokens there were at the last of the `losses`."""
        if not self.losses:
            return 0
        _, left, before = self.losses[-1]
        return before - left

    @property
    def n_prompt(self) -> int:
        """The tokens that the first forward processed."""
        first = self.steps[0]
        return int(first.positions[-1]) + 1

    def ends(self) -> Tensor:
        """Return how many tokens there were when each row was computed, (rows,)."""
        ends = torch.arange(1, len(self.ids) + 1)
        for step in self.steps:
            first, last = int(step.positions[0]), int(step.positions[-1])
            ends[first : last + 1] = last + 1
        return ends

    @property
    def is_padded(self) -> bool:
        """Whether the text does not begin at input column 0."""
        return bool(self.input_rows) and self.input_rows[0] > 0

    def prompt_positions(self) -> Tensor | None:
        """The program's position ids (1, rows), if it passed other ones than 0, 1, 2 … at first.

        None for ids that only decode steps have otherwise: those continue a prompt wrongly.
        """
        first = self.steps[0].evidence
        n = self.n_prompt
        if self.passed is None or first.positions is None or self.passed[:n] == tuple(range(n)):
            return None
        return torch.tensor([self.passed])

    def passed_positions(self) -> Tensor | None:
        """The program's position ids (1, rows) where they are not 0, 1, 2 …, else None."""
        if self.passed is None or self.passed == tuple(range(len(self.ids))):
            return None
        return torch.tensor([self.passed])


def read_sequence(
    steps: Sequence[StepEvidence], batch: int, config: Any, *, keeps_rows: bool = False
) -> AuditedSequence:
    """Return the sequence of one batch row; it ends where the inputs do not continue it.

    Where the cache has become shorter, its newest rows are dropped; `keeps_rows` keeps them.
    """
    columns: list[int] = []
    is_real: list[bool] = []
    passed: list[int] | None = []
    sequence = AuditedSequence(batch)
    placed: list[tuple[StepEvidence, int, int, int]] = []
    steps, order, rows = _follow_row(steps, batch)
    for evidence, known, batch in zip(steps, order, rows, strict=True):
        n_new, reason = _new_rows(evidence, batch, columns)
        if placed:
            is_unordered = len(placed) > 1 and known is None
            reason = _unfollowed(steps[0], evidence, is_unordered=is_unordered) or reason
        n_cached = evidence.kv_before
        if not reason and 0 < n_cached < len(columns) - sequence.n_lost:
            if keeps_rows:
                sequence.losses.append((evidence.step, n_cached, len(columns)))
            else:
                # The cache was cropped, as after rejected proposals: the newest rows are gone.
                columns, is_real = columns[:n_cached], is_real[:n_cached]
                passed = None if passed is None else passed[:n_cached]
            sequence.crops.append((evidence.generation, evidence.step))
        if reason:
            sequence.stopped = f"from step {evidence.step} on: {reason}"
            break
        assert evidence.ids is not None
        row = evidence.ids[min(batch, len(evidence.ids) - 1)].tolist()[evidence.q_len - n_new :]
        first = len(columns)
        columns += row
        is_real += _real(evidence, batch, n_new)
        passed = _extend_passed(passed, evidence, batch, n_new)
        sequence.has_default_positions &= evidence.positions is None
        placed.append((evidence, first, n_new, batch))
    if columns and all(is_real):
        n_pads = _unmasked_padding(columns, steps[0], config)
        sequence.padding = tuple(columns[:n_pads])
        is_real[:n_pads] = [False] * n_pads
    position = torch.cumsum(torch.tensor(is_real, dtype=torch.long), 0) - 1
    sequence.ids = tuple(id_ for id_, real in zip(columns, is_real, strict=True) if real)
    sequence.input_rows = tuple(n for n, real in enumerate(is_real) if real)
    if passed is not None and len(passed) == len(columns):
        sequence.passed = tuple(passed[n] for n in sequence.input_rows)
    stop = len(columns)
    for evidence, first, n_new, place in reversed(placed):
        step = _placed_step(evidence, first, n_new, stop, is_real, position)
        stop = min(stop, first)  # rows that a later crop dropped are not those of the text
        if step is not None:
            step.row = place
            sequence.steps.insert(0, step)
    return sequence


def _follow_row(
    steps: Sequence[StepEvidence], batch: int
) -> tuple[Sequence[StepEvidence], Sequence[list[int] | None], Sequence[int]]:
    """Return the steps of one batch row, the order of the rows in each, and its place there."""
    order = row_order(steps)
    sizes = [_n_rows(one) for one in steps]
    rows = lineage(batch, order, sizes)
    if sizes and sizes[-1] < sizes[0]:  # rows leave the batch when their text has ended
        rows = followed(min(batch, sizes[0] - 1), order, sizes)
        steps, order = steps[: len(rows)], order[: len(rows)]
    encoder = steps[0].encoder if steps else None
    if encoder is not None:  # equal texts of two rows are of different inputs of the encoder
        order, rows = [[] for _ in steps], [batch] * len(steps)
    return steps, order, rows


def _unfollowed(first: StepEvidence, step: StepEvidence, *, is_unordered: bool) -> str:
    """Return why the rows of a step after the first one are not those of one text, "" if they are.

    `is_unordered` says that it is not known which row of the step before each row continues.
    """
    if step.is_quantised:
        return "the cache is quantised, so its keys and values are not those of the text"
    if first.encoder is not None and first.encoder.has_equal_rows():
        return "beams, and several texts for one input, of a model with an encoder"
    if is_unordered and has_equal_prompts(first):
        return "the batch rows have the same prompt, so they may be beams, which change places"
    return ""


def row_order(steps: Sequence[StepEvidence]) -> list[list[int] | None]:
    """Return which row of the step before each row of a step continues, None where unknown.

    Rows change places among those of the same prompt, or where the batch changes its size. Rows of
    another prompt are a fault, so their cache is not followed.
    """
    order: list[list[int] | None] = [None] * min(1, len(steps))
    prompts = [list(range(_n_rows(one))) for one in steps[:1]]  # the first row of the same prompt
    if steps and steps[0].ids is not None:
        texts = steps[0].ids.tolist()
        prompts = [[texts.index(text) for text in texts]]
    for before, now in pairwise(steps):
        found = _text_parents(before, now) or parents(before.keys_after, now.keys_before)
        last, n = prompts[-1], _n_rows(now)
        if found is not None and n == len(last):
            found = [p if last[p] == last[row] else row for row, p in enumerate(found)]
        order.append(found)
        prompts.append([last[p] for p in found or [min(row, len(last) - 1) for row in range(n)]])
    return order


def _text_parents(before: StepEvidence, now: StepEvidence) -> list[int] | None:
    """Return the parents of rows that are fed again as a whole, without a cache."""
    if now.kv_before or before.kv_before or before.ids is None or now.ids is None:
        return None
    known = before.ids.tolist()
    heads = [row[: before.q_len] for row in now.ids.tolist()]
    if not all(head in known for head in heads):
        return None
    return [
        row if row < len(known) and known[row] == head else known.index(head)
        for row, head in enumerate(heads)
    ]


def _n_rows(evidence: StepEvidence) -> int:
    return 1 if evidence.ids is None else len(evidence.ids)


def has_equal_prompts(first: StepEvidence) -> bool:
    """Whether all rows of a batch have the same tokens, as beams have at first."""
    ids = first.ids
    return ids is not None and len(ids) > 1 and bool((ids == ids[0]).all())


def _placed_step(
    evidence: StepEvidence,
    first: int,
    n_new: int,
    stop: int,
    is_real: list[bool],
    position: Tensor,
) -> AuditedStep | None:
    assert evidence.rows is not None
    begin = evidence.q_len - n_new  # the first new row of this forward
    pairs = [
        (kept, int(position[first + row - begin]))
        for kept, row in enumerate(evidence.rows.tolist())
        if row >= begin and first + row - begin < stop and is_real[first + row - begin]
    ]
    if not pairs:
        return None
    kept, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    return AuditedStep(evidence, kept, positions)


def _new_rows(evidence: StepEvidence, batch: int, known: Sequence[int]) -> tuple[int, str]:
    """Return how many rows of a forward are new, or why it does not continue the sequence."""
    if not known and evidence.kv_before:
        if evidence.n_embedded:
            return 0, _embedded(evidence.kv_before - evidence.n_embedded, evidence.n_embedded)
        what = f"{evidence.kv_before} keys were in the cache before the first recorded forward"
        return 0, f"{what}, and their tokens are not known"
    if not known or 0 < evidence.kv_before <= len(known):
        return evidence.q_len, ""
    assert evidence.ids is not None
    if not evidence.kv_before:
        ids = evidence.ids[min(batch, len(evidence.ids) - 1)].tolist()
        if ids[: len(known)] == list(known) and len(ids) > len(known):
            return len(ids) - len(known), ""
        return 0, "the forward does not continue the sequence"
    if 0 < evidence.n_embedded == evidence.kv_before - len(known):
        return 0, _embedded(0, evidence.n_embedded)
    what = f"the cache held {evidence.kv_before} keys where {len(known)} tokens had been fed"
    return 0, f"{what}, and what the others are is not known"


def _embedded(n_before: int, n_embedded: int) -> str:
    """Return that the tokens of rows are not known, and of keys from before them."""
    rows = "row was" if n_embedded == 1 else "rows were"
    text = f"{n_embedded} {rows} given as inputs_embeds, without token ids"
    if n_before <= 0:
        return text
    keys = "key was" if n_before == 1 else "keys were"
    return f"{text}, and {n_before} {keys} in the cache before the first recorded forward"


def _real(evidence: StepEvidence, batch: int, n_new: int) -> list[bool]:
    mask = evidence.padding
    if mask is None:
        n_pads = _padding_by_positions(evidence, batch) if n_new == evidence.q_len else 0
        return [row >= n_pads for row in range(n_new)]
    if mask.shape[1] < n_new:
        return [True] * n_new
    row = mask[min(batch, len(mask) - 1)]
    return [bool(one) for one in row[-n_new:].tolist()]


def _padding_by_positions(evidence: StepEvidence, batch: int) -> int:
    """Return how many equal tokens at the beginning of a prompt are padding by its position ids.

    Without an attention mask only these say so: they begin after the padding, which has the
    position 0 (a count that is not below 0), or 1 (the way of `generate`).
    """
    positions, ids = evidence.positions, evidence.ids
    if positions is None or ids is None or evidence.kv_before or len(ids) < 2:
        return 0
    given = positions[min(batch, len(positions) - 1)].tolist()
    run = sum(1 for _ in takewhile(lambda one: one == given[0], given))
    following = given[run : run + 1]
    n_pads = {(0, 1): run - 1, (1, 0): run}.get((given[0], *following), 0)
    row = ids[min(batch, len(ids) - 1), :n_pads].tolist()
    return n_pads if len({*row}) == 1 else 0


def _extend_passed(
    passed: list[int] | None, evidence: StepEvidence, batch: int, n_new: int
) -> list[int] | None:
    positions = evidence.positions
    if passed is None:
        return None
    if positions is None and evidence.padding is None:  # what the model makes by default
        stop = evidence.kv_before + evidence.q_len
        return [*passed, *range(stop - n_new, stop)]
    if positions is None or positions.shape[1] < n_new:
        return None
    return passed + positions[min(batch, len(positions) - 1)].tolist()[-n_new:]


def _unmasked_padding(columns: list[int], first: StepEvidence, config: Any) -> int:
    """Return the padding tokens at the beginning that no attention mask excludes."""
    pad = getattr(config, "pad_token_id", None)
    eos = getattr(config, "eos_token_id", None)
    ends = {*(eos if isinstance(eos, list | tuple) else (eos,))}
    fillers = ({pad} | ends) - {None}
    head = columns[: first.q_len]
    if first.padding is not None or first.has_dense_mask or not head or head[0] not in fillers:
        return 0
    n = sum(1 for _ in takewhile(lambda id_: id_ == head[0], head))
    if n == len(head):
        return 0
    assert first.ids is not None
    others = [row[0] for row in first.ids.tolist()]
    is_batch = len(others) > 1 and any(other != head[0] for other in others)
    return n if n > 1 or is_batch else 0
