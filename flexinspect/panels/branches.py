"""The branches panel: the tree of forks, and a branch beside its base step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.strip import Strip

from flexinspect.compare.branches import (
    Node,
    SideBySide,
    change_words,
    fork_of,
    last_step,
    mask_words,
    side_by_side,
    tree,
)
from flexinspect.panels.base import Go, Help, Missing, NoOptions, Panel, Picture, Request
from flexinspect.panels.source import Source
from flexinspect.text import visible
from flexinspect.trace.rows import BranchRow
from flexinspect.widgets.lines import Span, clipped, line, right
from flexinspect.widgets.look import Look

_STEP, _KL, _LOGIT, _MASK = 5, 9, 8, 14
_SIDE_BY_SIDE_LINES = 3
"""Lines that the comparison keeps at least: its heading and two steps."""


@dataclass(frozen=True, slots=True)
class BranchesData:
    """The tree, the branch that is compared (None without forks), and its steps in the window."""

    nodes: tuple[Node, ...]
    current: int
    shown: BranchRow | None
    step: int
    rows: tuple[SideBySide, ...] = ()

    @property
    def parted(self) -> SideBySide | None:
        """The first step in the window where both chose different tokens."""
        return next((row for row in self.rows if row.is_parted), None)


class BranchesPanel(Panel[BranchesData, NoOptions]):
    """The tree above, base and branch side by side below."""

    name: ClassVar[str] = "branches"
    title: ClassVar[str] = "Branches"
    needs_tokens: ClassVar[bool] = True
    help: ClassVar[Help] = Help(
        "It shows the branches of this generation as a tree, and the branch you are on beside the "
        "one it left: what each chose, and how far apart the two are.",
        "KL is at least that many nats, from the tokens recorded in both; logit is the largest "
        "change of one of them; mask counts cells that differ; click a branch or a step to go "
        "there.",
        "Look for the step at which the texts part, and whether logits had moved before it: then "
        "the change was felt before it was seen.",
    )
    sized: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> BranchesData:
        """Read the tree, and the steps of the branch that fit the height."""
        reader, place = source.reader, request.place
        nodes = tuple(tree(reader.branches(place.generation)))
        if not nodes:
            raise Missing("This generation has no branch yet.")
        shown = _shown(nodes, place.branch)
        if shown is None:
            return BranchesData(nodes, place.branch, None, place.step)
        last = last_step(reader, shown)
        if last is None:
            return BranchesData(nodes, place.branch, shown, place.step)
        n = max(request.height - len(nodes) - 2, _SIDE_BY_SIDE_LINES)
        start = max(fork_of(shown), min(place.step - n // 2, last + 1 - n))
        rows = side_by_side(reader, shown, start, min(start + n, last + 1), reader.mask)
        return BranchesData(nodes, place.branch, shown, place.step, tuple(rows))

    def describe(self, data: BranchesData) -> list[str]:
        """Return the tree, then the comparison, a line each."""
        lines = [_node_words(node, data.current) for node in data.nodes]
        if data.shown is None:
            return [*lines, "Nothing was forked: F goes on from a step with another token."]
        lines.append(f"Branch {data.shown.branch} beside branch {data.shown.parent}:")
        for row in data.rows:
            base, own = (_word(text) for text in row.texts)
            kl = "" if row.kl is None else f", KL at least {row.kl:.4g} nats"
            moved = row.difference.logits if row.difference is not None else None
            logit = "" if moved is None else f", a logit moved by {moved:.4g}"
            mask = mask_words(row.difference.masks) if row.difference is not None else ""
            lines.append(
                f"step {row.step}: {base} | {own}{kl}{logit}{f', mask: {mask}' if mask else ''}"
            )
        if data.parted is not None:
            lines.append(f"The texts part at step {data.parted.step}.")
        return lines

    def paint(self, data: BranchesData, request: Request[NoOptions], look: Look) -> Picture:
        """Draw the tree, then the steps."""
        width, height = request.width, request.height
        room = max(height - _SIDE_BY_SIDE_LINES, 1) if data.shown is not None else height
        strips = [_node_line(node, data, width, look) for node in data.nodes[:room]]
        if data.shown is None:
            text = "Nothing was forked. F goes on from a step with another token, E with another "
            text += "mask, while the model is alive."
            strips.append(line([(text, look.style("muted"))], width, look.style("text")))
            return Picture(strips[:height], "one branch")
        strips.append(_heading(data.shown, width, look))
        strips += [_row_line(row, data, width, look) for row in data.rows]
        parted = data.parted
        note = f"parts at step {parted.step}" if parted else "same tokens in these steps"
        return Picture(strips[:height], note)

    def point(
        self, x: int, y: int, data: BranchesData, request: Request[NoOptions], *, click: bool
    ) -> Go | None:
        """Go to the branch or the step that was clicked."""
        if not click:
            return None
        room = max(request.height - _SIDE_BY_SIDE_LINES, 1) if data.shown else request.height
        n_nodes = min(len(data.nodes), room)
        if y < n_nodes:
            return Go(branch=data.nodes[y].row.branch)
        at = y - n_nodes - 1
        return Go(step=data.rows[at].step) if 0 <= at < len(data.rows) else None


def _shown(nodes: tuple[Node, ...], branch: int) -> BranchRow | None:
    """Return the branch to compare: the current one, on branch 0 the last that left it."""
    rows = [node.row for node in nodes]
    here = next((row for row in rows if row.branch == branch and row.parent is not None), None)
    return here or next((row for row in reversed(rows) if row.parent == branch), None)


def _node_words(node: Node, current: int) -> str:
    row = node.row
    mark = "▸" if row.branch == current else " "
    stem = "  " * (node.depth - 1) + "└ " if node.depth else ""
    origin = f" from step {row.fork_step}: {change_words(row)}" if row.parent is not None else ""
    answer = f" · {visible(row.answer).strip()}" if row.answer.strip() else ""
    return f"{mark} {stem}branch {row.branch}{origin} · {row.state}{answer}"


def _node_line(node: Node, data: BranchesData, width: int, look: Look) -> Strip:
    style = look.style("chosen" if node.row.branch == data.current else "text")
    return line([(_node_words(node, data.current), style)], width, look.style("text"))


def _texts_width(width: int) -> int:
    return max((width - _STEP - _KL - _LOGIT - _MASK - 2) // 2, 6)


def _heading(row: BranchRow, width: int, look: Look) -> Strip:
    each = _texts_width(width)
    text = right("step", _STEP) + " " + clipped(f"branch {row.parent}", each) + " "
    text += clipped(f"branch {row.branch}", each)
    text += right("KL ≥", _KL) + right("logit", _LOGIT) + "  mask"
    return line([(text, look.style("muted"))], width, look.style("text"))


def _word(text: str | None) -> str:
    return "–" if text is None else f"“{visible(text)}”"


def _row_line(row: SideBySide, data: BranchesData, width: int, look: Look) -> Strip:
    each = _texts_width(width)
    here = row.step == data.step
    base, own = (clipped(_word(text), each) for text in row.texts)
    text = look.style("text")
    spans: list[Span] = [
        (right(str(row.step), _STEP) + " ", look.style("chosen" if here else "muted")),
        (base + " ", text),
        (own, look.style("warn") if row.is_parted else text),
        (right("" if row.kl is None else f"{row.kl:.3g}", _KL), text),
    ]
    if row.difference is not None:
        moved = row.difference.logits
        spans.append((right("" if moved is None else f"{moved:.3g}", _LOGIT), text))
        spans.append(("  " + mask_words(row.difference.masks), look.style("warn")))
    return line(spans, width, text)
