"""The facts about a mask that stand beside its picture: density, segments, blocks, phases."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from rich.cells import cell_len

from flexinspect.core.errors import MaskError
from flexinspect.core.text import MAX_LISTED_POSITIONS, format_ranges
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.census import (
    MAX_TABLE,
    Census,
    Probe,
    Report,
    fold_table,
    full_edges,
    part_of,
    past_cells,
    take_census,
)
from flexinspect.masks.counting import Counts
from flexinspect.masks.key_blocks import BLOCK_SIZE
from flexinspect.masks.known_masks import NegatedMask, causal
from flexinspect.masks.mask_presets import IntArray, Segments
from flexinspect.masks.picture_text import Places
from flexinspect.masks.verification import other_segments
from flexinspect.records.prompt import SegmentKind, generated_start

MAX_TABLE_SEGMENTS = 256
"""Segments up to which pairs of segments are counted; a longer list is of no use to a reader."""


class BlockWork(Struct, frozen=True):
    """The blocks of `create_block_mask`, of `size` rows and keys each.

    FlexAttention computes full blocks without the mask_mod, applies it in partial ones, and skips
    empty ones. A block that extends beyond the mask is never full. `causal` is the number of
    blocks that a causal mask visits.
    """

    size: int
    full: int
    partial: int
    empty: int
    causal: int

    @property
    def visited(self) -> int:
        """The number of blocks that are not empty."""
        return self.full + self.partial

    @property
    def skipped(self) -> float:
        """The share of all blocks that are skipped."""
        return self.empty / max(self.visited + self.empty, 1)

    @property
    def mask_mod_share(self) -> float:
        """The share of the visited blocks in which the mask_mod is applied."""
        return self.partial / max(self.visited, 1)


class PhaseFacts(Struct, frozen=True):
    """Rows of a phase: open cells of those in reach, and open cells to other segments."""

    n_rows: int
    n_open: int
    n_cells: int
    n_cross: int

    @property
    def density(self) -> float:
        """The share of cells in reach that are open."""
        return self.n_open / max(self.n_cells, 1)


class CellDifference(Struct, frozen=True):
    """The cells in which a mask differs from another one, which opens lost ones."""

    name: str
    lost: Probe
    leaked: Probe

    def lines(self, places: Places) -> list[str]:
        """Return the counts and the first lost and leaked cells in words."""
        facts = {"name": self.name, "lost": self.lost.count, "leaked": self.leaked.count}
        if not self.lost.count + self.leaked.count:
            return [places.labels("analysis_same", name=self.name)]
        lines = [places.labels("analysis_difference", **facts)]
        for probe, is_open in ((self.leaked, True), (self.lost, False)):
            if probe.first is not None:
                cell = places.cell(*probe.first, is_open=is_open)
                lines.append(f"  {places.labels('verify_first', cell=cell)}")
        return lines


class MaskAnalysis(Struct, frozen=True):
    """The facts about the mask of one head.

    The cells in reach are those up to the diagonal if the mask `is_causal`, else all. `pairs` are
    open cells by segment of the row and segment of the key, and `pair_cells` those in reach, int64
    (segments, segments); they are empty without segments or with more than `MAX_TABLE_SEGMENTS`.
    A phase without rows is None.
    """

    name: str
    n_rows: int
    n_keys: int
    n_open: int
    n_cells: int
    is_causal: bool
    pairs: Counts
    pair_cells: Counts
    empty_rows: npt.NDArray[np.intp]
    unseen_keys: npt.NDArray[np.intp]
    blocks: BlockWork
    encoding: PhaseFacts | None
    generation: PhaseFacts | None
    difference: CellDifference | None = None

    @property
    def density(self) -> float:
        """The share of cells in reach that are open."""
        return self.n_open / max(self.n_cells, 1)

    def lines(self, places: Places) -> list[str]:
        """Return the facts in words."""
        label = places.labels
        reach = label("analysis_reach_causal" if self.is_causal else "analysis_reach_all")
        facts = {"open": self.n_open, "share": f"{self.density:.1%}"}
        lines = [
            label("analysis_title", name=self.name),
            label("analysis_density", total=self.n_cells, reach=reach, **facts),
        ]
        for name in ("encoding", "generation"):
            if (phase := getattr(self, name)) is not None:
                lines.append(_phase_line(phase, label(f"text_{name}"), places))
        for kind in ("empty_rows", "unseen_keys"):
            listed = _listed(getattr(self, kind)) or label("analysis_none")
            lines.append(label(f"analysis_{kind}", positions=listed))
        lines += _block_lines(self.blocks, places)
        if len(self.pairs):
            lines += ["", label("analysis_pairs"), *_pair_lines(self, places)]
        return [*lines, "", *self.difference.lines(places)] if self.difference else lines

    def as_json(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        phases = {"encoding": self.encoding, "generation": self.generation}
        return {
            "mask": self.name,
            "rows": self.n_rows,
            "keys": self.n_keys,
            "open": self.n_open,
            "cells": self.n_cells,
            "density": self.density,
            "causal": self.is_causal,
            "pairs": {"open": self.pairs.tolist(), "cells": self.pair_cells.tolist()},
            "empty_rows": self.empty_rows[:MAX_LISTED_POSITIONS].tolist(),
            "unseen_keys": self.unseen_keys[:MAX_LISTED_POSITIONS].tolist(),
            "blocks": _properties(self.blocks, "visited", "skipped", "mask_mod_share"),
            **{name: _properties(phase, "density") for name, phase in phases.items() if phase},
            "difference": self.difference,
        }


def _properties(value: Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in (*value.__struct_fields__, *names)}


def analyse_mask(
    mask: CellMask,
    n_rows: int,
    n_keys: int,
    *,
    segments: Segments = (),
    block_size: int = BLOCK_SIZE,
    head: int = 0,
    against: CellMask | None = None,
    report: Report | None = None,
) -> MaskAnalysis:
    """Count what stands beside the picture of a mask, and its difference from `against`.

    Raises `MaskError` for a block size with which there are too many blocks to count.
    """
    n_blocks = -(-n_rows // block_size) * -(-n_keys // block_size)
    if n_blocks > MAX_TABLE // 4:
        hint = "Use a larger --block-size; FlexAttention's own is 128."
        raise MaskError(f"{n_blocks} blocks of {block_size} tokens are too many.", hint=hint)
    n_parts = 1 if against is None else 2
    borders = _segment_starts(segments)
    edges = _joined_edges(n_rows, borders, block_size), _joined_edges(n_keys, borders, block_size)
    probes: list[CellMask] = [NegatedMask(causal(())), other_segments(segments)]
    if against is not None:
        probes.append(NegatedMask(against))
    part = part_of(report, 0, n_parts)
    census = take_census(mask, *edges, head=head, probes=probes, report=part)
    difference = None
    if against is not None:
        whole, missing = (full_edges(n_rows), full_edges(n_keys)), (NegatedMask(mask),)
        part = part_of(report, 1, n_parts)
        lost = take_census(against, *whole, head=head, probes=missing, report=part).probes[0]
        difference = CellDifference(against.name, lost, census.probes[2])
    return _facts(mask.name, census, edges, segments, block_size, difference)


def _segment_starts(segments: Segments) -> list[int]:
    """Return where segments start; only where generated text does if they are too many."""
    if len(segments) <= MAX_TABLE_SEGMENTS:
        return [segment.start for segment in segments]
    return [segment.start for segment in segments if segment.kind is SegmentKind.GENERATED]


def _joined_edges(n: int, borders: list[int], block_size: int) -> IntArray:
    """Return the edges of blocks and segments together."""
    edges = np.unique([0, n, *range(0, n, block_size), *(b for b in borders if b < n)])
    return edges.astype(np.int32)


def _facts(
    name: str,
    census: Census,
    edges: tuple[IntArray, IntArray],
    segments: Segments,
    block_size: int,
    difference: CellDifference | None,
) -> MaskAnalysis:
    """Return the facts of a census whose ranges begin at blocks and segments."""
    n_rows, n_keys = int(edges[0][-1]), int(edges[1][-1])
    is_causal = not census.probes[0].count
    sizes = np.diff(edges[0]).astype(np.int64)[:, None] * np.diff(edges[1])
    reach = past_cells(*edges) if is_causal else sizes
    pairs = pair_cells = np.zeros((0, 0), np.int64)
    if 0 < len(segments) <= MAX_TABLE_SEGMENTS:
        inside = [[s.start for s in segments if s.start < n] for n in (n_rows, n_keys)]
        coarse = [
            np.array([*starts, n]) for starts, n in zip(inside, (n_rows, n_keys), strict=True)
        ]
        pairs, pair_cells = (_fold(table, edges, coarse) for table in (census.table, reach))
    generated = generated_start(segments)
    phases = _phases(census, reach, edges, n_rows if generated is None else min(generated, n_rows))
    return MaskAnalysis(
        name=name,
        n_rows=n_rows,
        n_keys=n_keys,
        n_open=census.n_open,
        n_cells=int(reach.sum()),
        is_causal=is_causal,
        pairs=pairs,
        pair_cells=pair_cells,
        empty_rows=np.flatnonzero(~census.row_any),
        unseen_keys=np.flatnonzero(census.key_counts == 0),
        blocks=_block_work(census.table, edges, block_size),
        encoding=phases[0],
        generation=phases[1],
        difference=difference,
    )


def _fold(table: Counts, edges: tuple[IntArray, IntArray], coarse: list[IntArray]) -> Counts:
    """Return a table with the ranges of both axes joined."""
    for axis in (0, 1):
        table = fold_table(table, edges[axis], coarse[axis], axis)
    return table


def _phases(
    census: Census, reach: Counts, edges: tuple[IntArray, IntArray], generated: int
) -> tuple[PhaseFacts | None, PhaseFacts | None]:
    """Return the facts of the rows before and from the first generated token on.

    Every key of the prompt is in another segment for a generated token.
    """
    row, key = (int(np.searchsorted(axis, generated)) for axis in edges)
    n_cross = census.probes[1].count, int(census.table[row:, :key].sum())
    n_rows = generated, int(edges[0][-1]) - generated
    encoding, generation = (
        PhaseFacts(n, int(census.table[part].sum()), int(reach[part].sum()), cross) if n else None
        for n, part, cross in zip(n_rows, (slice(row), slice(row, None)), n_cross, strict=True)
    )
    return encoding, generation


def _block_work(table: Counts, edges: tuple[IntArray, IntArray], block_size: int) -> BlockWork:
    coarse = [np.array([*range(0, int(e[-1]), block_size), int(e[-1])]) for e in edges]
    blocks, causal_cells = (_fold(t, edges, coarse) for t in (table, past_cells(*edges)))
    n_full, n_visited = int((blocks == block_size**2).sum()), int((blocks > 0).sum())
    return BlockWork(
        block_size,
        n_full,
        n_visited - n_full,
        blocks.size - n_visited,
        int((causal_cells > 0).sum()),
    )


# -- the facts in words ---------------------------------------------------------------------------


def _listed(positions: npt.NDArray[np.intp]) -> str:
    listed = format_ranges(positions[:MAX_LISTED_POSITIONS].tolist())
    return f"{listed}, … ({len(positions)})" if len(positions) > MAX_LISTED_POSITIONS else listed


def _phase_line(phase: PhaseFacts, name: str, places: Places) -> str:
    return places.labels(
        "analysis_phase",
        phase=name,
        rows=phase.n_rows,
        open=phase.n_open,
        total=phase.n_cells,
        share=f"{phase.density:.1%}",
        cross=phase.n_cross,
    )


def _block_lines(blocks: BlockWork, places: Places) -> list[str]:
    facts = {name: getattr(blocks, name) for name in ("size", "full", "partial", "empty")}
    work = {
        "visited": blocks.visited,
        "total": blocks.visited + blocks.empty,
        "causal": blocks.causal,
        "share": f"{blocks.skipped:.1%}",
    }
    return [
        places.labels("analysis_blocks", **facts),
        places.labels("analysis_skipped", **work),
        places.labels("analysis_mask_mod", share=f"{blocks.mask_mod_share:.1%}"),
    ]


def _pair_lines(analysis: MaskAnalysis, places: Places) -> list[str]:
    """Return a table of open cells by pair of segments, each as a count of those in reach."""
    segments = places.segments[: len(analysis.pairs)]
    names = [f"{number} {places.segment(segment)}" for number, segment in enumerate(segments)]
    cells = [
        [f"{n}/{total}" if total or n else "" for n, total in zip(*row, strict=True)]
        for row in zip(analysis.pairs.tolist(), analysis.pair_cells.tolist(), strict=True)
    ]
    header = [str(number) for number in range(len(cells[0]))]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    return [
        "  " + " ".join([name, *(c.rjust(w) for c, w in zip(row, widths, strict=True))]).rstrip()
        for name, row in zip(_padded(["", *names]), [header, *cells], strict=True)
    ]


def _padded(names: list[str]) -> list[str]:
    width = max(map(cell_len, names))
    return [name + " " * (width - cell_len(name)) for name in names]
