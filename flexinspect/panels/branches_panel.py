"""The branches panel: the tree of forks, and a branch compared with its parent step by step."""

from __future__ import annotations

from functools import partial
from itertools import chain

from msgspec import Struct
from textual.strip import Strip

from flexinspect.analysis import branch_comparison
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.text_lines import Pen, align_right, clip_text
from flexinspect.drawing.theme import Theme
from flexinspect.panels import base
from flexinspect.panels.base import Missing, Navigate, NoOptions, Picture, Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.trace.queries import branch_of_step, step_bounds
from flexinspect.trace.query_results import BranchRow
from flexinspect.trace.reader import TraceReader

_STEP_WIDTH, _KL_WIDTH, _LOGIT_WIDTH = 5, 11, 8
_MIN_COMPARISON_LINES = 4
"""Minimum lines of the comparison: its heading, two steps and the masks."""

NO_FORK = (
    "There is no fork. While the model is running, F continues from a step with another token, "
    "E with another mask."
)


class StepPair(Struct, frozen=True):
    """One step of a branch and its parent: the chosen texts, None where one has no such step."""

    step: int
    base: str | None
    own: str | None
    change: branch_comparison.StepChange | None = None

    @property
    def is_different(self) -> bool:
        """Whether both have the step and chose different tokens."""
        return None not in (self.base, self.own) and self.base != self.own


class BranchesData(Struct, frozen=True):
    """The tree, the branch that is compared (None without forks), and its steps in the window.

    `diverged_at` is the first step at which both chose different tokens, None without one.
    """

    nodes: tuple[branch_comparison.BranchNode, ...]
    place: TracePlace
    compared: BranchRow | None = None
    pairs: tuple[StepPair, ...] = ()
    diverged_at: int | None = None
    masks: branch_comparison.MaskChange | None = None


class BranchesPanel(base.Panel[BranchesData, NoOptions]):
    """The tree of branches, and below it a branch and its parent side by side."""

    name = "branches"
    title = "Branches"
    needs_tokens = True
    help = base.Help(
        "It shows the branches of this generation as a tree, and compares the current branch with "
        "its parent: the tokens that each chose, the distance of their distributions, and the "
        "difference of their masks.",
        "KL is in nats from the parent to the branch; with a ≥ it is a lower bound, computed from "
        "the tokens listed in both; logit is the largest change of one of them; click a branch or "
        "a step to go there.",
        "Look for the step at which the texts diverge, and whether logits changed before it: then "
        "the fork had an effect before the text showed it.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[NoOptions]) -> BranchesData:
        """Read the tree, and the steps of the branch that fit the height."""
        reader, place = source.reader, request.place
        nodes = tuple(branch_comparison.branch_tree(reader, place.generation))
        if not nodes:
            raise Missing("This generation has no branch yet.")
        # The current branch, or for the root its last fork.
        rows = [node.row for node in nodes]
        own = (row for row in rows if row.branch == place.branch and row.parent is not None)
        last_fork = (row for row in reversed(rows) if row.parent == place.branch)
        shown = next(chain(own, last_fork), None)
        if shown is None or shown.parent is None:
            return BranchesData(nodes, place)
        pairs = _load_pairs(reader, shown, place.step, request.height - len(nodes) - 2)
        has_change = any(pair.step == place.step and pair.change is not None for pair in pairs)
        masks = _diff_masks(source, place, shown.parent, shown.branch) if has_change else None
        both = (shown.parent, shown.branch)
        diverged_at = branch_comparison.first_difference(reader, place.generation, *both)
        if diverged_at is not None:
            step = (reader, place.generation, diverged_at)
            if None in [_load_step_text(*step, branch) for branch in both]:
                diverged_at = None  # one branch ended
        return BranchesData(nodes, place, shown, tuple(pairs), diverged_at, masks)

    def describe(self, data: BranchesData) -> list[str]:
        """Return the tree, then the comparison, one line per branch and step."""
        lines = [_format_node(node, data.place.branch) for node in data.nodes]
        if data.compared is None:
            return [*lines, NO_FORK]
        lines.append(f"Branch {data.compared.branch} compared with branch {data.compared.parent}:")
        for pair in data.pairs:
            text = f"step {pair.step}: {_quote_text(pair.base)} | {_quote_text(pair.own)}"
            if pair.change is not None:
                kl, largest = _format_change(pair.change)
                text += f", KL {kl} nats, largest logit change {largest}"
            lines.append(text)
        if data.diverged_at is not None:
            lines.append(f"The texts diverge at step {data.diverged_at}.")
        if data.masks is not None:
            lines.append(_describe_masks(data.masks, data.place))
        return lines

    def paint(self, data: BranchesData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the tree, then the steps, then how the masks differ."""
        pen, height, current = Pen(theme, request.width), request.height, data.place.branch
        n_nodes = height if data.compared is None else max(height - _MIN_COMPARISON_LINES, 1)
        nodes = data.nodes[:n_nodes]
        targets: list[Navigate | None] = [Navigate(branch=node.row.branch) for node in nodes]
        strips = []
        for node in nodes:
            style = "chosen" if node.row.branch == current else "text"
            strips.append(pen.line((_format_node(node, current), style)))
        if data.compared is None:
            strips += pen.paragraph(NO_FORK, "muted")
        else:
            strips.append(_draw_heading(data.compared, pen))
            strips += [_draw_pair(pair, data, pen) for pair in data.pairs]
            targets += [None, *(Navigate(step=pair.step) for pair in data.pairs)]
        if data.masks is not None:
            strips[height - 1 :] = []
            text = _describe_masks(data.masks, data.place)
            paragraph = pen.paragraph(text, "muted")
            fits = len(strips) + len(paragraph) <= height
            strips += paragraph if fits else [pen.line((text, "muted"))]
        note = "the same tokens"
        if data.compared is None:
            note = "one branch"
        elif data.diverged_at is not None:
            note = f"diverges at step {data.diverged_at}"
        target = dict(enumerate(targets)).get
        return Picture(strips[:height], note, target=lambda x, y: target(y))


def _diff_masks(
    source: Source, place: TracePlace, parent: int, branch: int
) -> branch_comparison.MaskChange | None:
    """Compare the masks of all steps up to this one; the mask of each step is cached."""
    reader, generation = source.reader, place.generation
    at = {"layer": place.layer, "head": place.head}

    def find_mask(owner: int, step: int) -> branch_comparison.StepMask | None:
        key = ("branches.mask", generation, owner, step, *at.values())
        read = partial(branch_comparison.step_mask, reader, generation, step, owner, **at)
        return source.get_or_create(key, read)

    return branch_comparison.mask_change(
        reader, generation, place.step, parent, branch, **at, find=find_mask
    )


def _load_pairs(reader: TraceReader, shown: BranchRow, step: int, room: int) -> list[StepPair]:
    """Return the steps around `step`, from the fork to the end of both branches."""
    generation, both = shown.generation, (shown.parent or 0, shown.branch)
    bounds = (step_bounds(reader, generation, branch) for branch in both)
    last = max((newest for _, newest in filter(None, bounds)), default=-1)
    n = max(room, 2)
    start = max(shown.fork_step or 0, min(step - n // 2, last + 1 - n))
    pairs = []
    for number in range(start, min(start + n, last + 1)):
        base, own = (_load_step_text(reader, generation, number, branch) for branch in both)
        has_both = base is not None and own is not None
        change = (
            branch_comparison.step_change(reader, generation, number, *both) if has_both else None
        )
        pairs.append(StepPair(number, base, own, change))
    return pairs


def _load_step_text(reader: TraceReader, generation: int, step: int, branch: int) -> str | None:
    owner = branch_of_step(reader, generation, step, branch)
    if reader.step(generation, step, owner) is None:
        return None
    tokens = reader.step_tokens(generation, step, owner)
    return tokens[-1].text if tokens else "?"


def _format_node(node: branch_comparison.BranchNode, current: int) -> str:
    row = node.row
    mark = "▸" if row.branch == current else " "
    stem = "  " * (node.depth - 1) + "└ " if node.depth else ""
    origin = ""
    if row.parent is not None:
        origin = f" from step {row.fork_step}: {escape_unprintable(node.change_text)}"
    answer = f" · {escape_unprintable(row.answer).strip()}" if row.answer.strip() else ""
    return f"{mark} {stem}branch {row.branch}{origin} · {row.state}{answer}"


def _text_width(width: int) -> int:
    return max((width - _STEP_WIDTH - _KL_WIDTH - _LOGIT_WIDTH - 2) // 2, 6)


def _draw_heading(row: BranchRow, pen: Pen) -> Strip:
    text_width = _text_width(pen.width)
    names = [f"branch {row.parent}", f"branch {row.branch}"]
    if max(map(len, names)) > text_width:
        names = [f"br {row.parent}", f"br {row.branch}"]
    parent, branch = (clip_text(name, text_width) for name in names)
    step = align_right("step", _STEP_WIDTH)
    figures = align_right("KL", _KL_WIDTH) + align_right("logit", _LOGIT_WIDTH)
    return pen.line((f"{step} {parent} {branch}{figures}", "muted"))


def _quote_text(text: str | None) -> str:
    return "–" if text is None else f"“{escape_unprintable(text)}”"


def _format_change(change: branch_comparison.StepChange | None) -> tuple[str, str]:
    if change is None:
        return "", ""
    bound = "≥ " if change.basis == "candidates" else ""
    return f"{bound}{change.kl:.3g}", f"{change.largest:.3g}"


def _draw_pair(pair: StepPair, data: BranchesData, pen: Pen) -> Strip:
    text_width, (kl, largest) = _text_width(pen.width), _format_change(pair.change)
    step_style = "chosen" if pair.step == data.place.step else "muted"
    return pen.line(
        (align_right(str(pair.step), _STEP_WIDTH) + " ", step_style),
        (clip_text(_quote_text(pair.base), text_width) + " ", "text"),
        (clip_text(_quote_text(pair.own), text_width), "warn" if pair.is_different else "text"),
        (align_right(kl, _KL_WIDTH) + align_right(largest, _LOGIT_WIDTH), "text"),
    )


def _describe_masks(masks: branch_comparison.MaskChange, place: TracePlace) -> str:
    where = f"(layer {masks.layer}, head {place.head}, up to this step)"
    if not masks.n_opened and not masks.n_closed:
        return f"Masks: the same in all {masks.n_rows} rows that both computed {where}."
    row, key = (*masks.opened, *masks.closed)[0]
    return (
        f"Masks: {plural(masks.n_opened, 'cell')} opened, {masks.n_closed} closed, "
        f"the first at row {row}, key {key} {where}."
    )
