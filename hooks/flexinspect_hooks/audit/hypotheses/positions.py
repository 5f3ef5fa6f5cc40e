"""Hypotheses about positions and the rotary embedding (RoPE)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit, Rotation
from flexinspect_hooks.audit.forward.rotary_tables import Angles, exact_angles, kind_names
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]
_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)


def _has_rope(probe: FaultProbe) -> bool:
    return "apply_rotary_pos_emb" in vars(probe.reference.namespace)


def rope_missing(probe: FaultProbe) -> Edits:
    """Neither queries nor keys are rotated, or only one of them is."""
    if not _has_rope(probe):
        return

    def none(turn: Rotation) -> tuple[Tensor, Tensor]:
        return turn.query, turn.key

    def without_query(turn: Rotation) -> tuple[Tensor, Tensor]:
        return turn.query, turn.rotate(turn.query, turn.key, turn.cos, turn.sin)[1]

    def without_key(turn: Rotation) -> tuple[Tensor, Tensor]:
        return turn.rotate(turn.query, turn.key, turn.cos, turn.sin)[0], turn.key

    same = ", or with position 0 for each of its rows, which is the same" if probe.is_decode else ""
    yield ForwardEdit(name="rope.missing", sentence=f"without RoPE{same}", rope=none)
    yield ForwardEdit(
        name="rope.missing", sentence="without RoPE of the queries", rope=without_query
    )
    yield ForwardEdit(name="rope.missing", sentence="without RoPE of the keys", rope=without_key)


def rope_doubled(probe: FaultProbe) -> Edits:
    """Queries and keys are rotated twice."""
    if not _has_rope(probe):
        return

    def twice(turn: Rotation) -> tuple[Tensor, Tensor]:
        once = turn.rotate(turn.query, turn.key, turn.cos, turn.sin)
        return turn.rotate(*once, turn.cos, turn.sin)

    def key_twice(turn: Rotation) -> tuple[Tensor, Tensor]:
        query, key = turn.rotate(turn.query, turn.key, turn.cos, turn.sin)
        return query, turn.rotate(query, key, turn.cos, turn.sin)[1]

    yield ForwardEdit(name="rope.doubled", sentence="with RoPE applied twice", rope=twice)
    yield ForwardEdit(
        name="rope.doubled", sentence="with RoPE applied twice to the keys", rope=key_twice
    )


def rope_turned(probe: FaultProbe) -> Edits:
    """The rotation goes the other way, or pairs neighbouring dimensions."""
    if not _has_rope(probe):
        return

    def backwards(turn: Rotation) -> tuple[Tensor, Tensor]:
        return turn.rotate(turn.query, turn.key, turn.cos, -turn.sin)

    def neighbours(turn: Rotation) -> tuple[Tensor, Tensor]:
        return _interleaved(turn.query, turn), _interleaved(turn.key, turn)

    name = "rope.turned"
    yield ForwardEdit(name=name, sentence="with RoPE turned the other way", rope=backwards)
    sentence = "with RoPE that pairs neighbouring dimensions"
    yield ForwardEdit(name=name, sentence=sentence, rope=neighbours)

    def mixed(turn: Rotation) -> tuple[Tensor, Tensor]:
        return _mixed(turn.query, turn), _mixed(turn.key, turn)

    sentence += ", by the angles of halves"
    yield ForwardEdit(name=name, sentence=sentence, rope=mixed)


def _interleaved(states: Tensor, turn: Rotation) -> Tensor:
    half = turn.cos.shape[-1] // 2
    cos, sin = turn.cos[:, None, :, :half], turn.sin[:, None, :, :half]
    even, odd = states[..., : 2 * half : 2], states[..., 1 : 2 * half : 2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((pairs, states[..., 2 * half :]), -1)


def _mixed(states: Tensor, turn: Rotation) -> Tensor:
    """Return states whose neighbours are exchanged, where cos and sin are laid out in halves."""
    size = turn.cos.shape[-1]
    own, rest = states[..., :size], states[..., size:]
    turned = torch.stack((-own[..., 1::2], own[..., ::2]), -1).flatten(-2)
    return torch.cat((own * turn.cos[:, None] + turned * turn.sin[:, None], rest), -1)


def rope_of_other_layers(probe: FaultProbe) -> Edits:
    """The rotary tables are those of another type of layer."""
    if not _has_rope(probe):
        return
    for kind in kind_names(probe.reference.model):

        def turned(turn: Rotation, kind: str = kind) -> tuple[Tensor, Tensor]:
            return turn.rotate(turn.query, turn.key, *turn.tables.of_kind(kind))

        base = _parameters(probe.config).get(kind, {}).get("rope_theta")
        text = f" (base {base:g})" if isinstance(base, int | float) else ""
        what = f"with the rotary tables of the {kind} layers{text}"
        yield ForwardEdit(name="rope.other-layers", sentence=what, rope=turned)


def _parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters of RoPE by the type of layer, "" if all layers have the same."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return {}
    nested = {name: one for name, one in found.items() if isinstance(one, dict)}
    return nested or {"": found}


def rope_base(probe: FaultProbe) -> Edits:
    """The rotary tables have another base, or no scaling."""
    if not _has_rope(probe):
        return
    own: set[Any] = set()
    tables: set[Any] = set()  # of a type of layers, which are tried as such
    for kind, one in _parameters(probe.config).items():
        is_plain = one.get("rope_type", "default") == "default"
        is_tried = is_plain and kind in kind_names(probe.reference.model)
        (tables if is_tried else own).add(one.get("rope_theta"))
    numbers = (one for one in (*_BASES, *own) if isinstance(one, int | float))
    bases = {base: f"{base:g}" for base in numbers if base not in tables}
    for base, text in bases.items():

        def turned(turn: Rotation, base: float = base) -> tuple[Tensor, Tensor]:
            return turn.rotate(turn.query, turn.key, *turn.tables(turn.positions, base))

        what = f"with RoPE of base {text}"
        yield ForwardEdit(name="rope.base", sentence=f"{what} and no scaling", rope=turned)


def rope_unscaled(probe: FaultProbe) -> Edits:
    """Cos and sin lack the factor of a long-context scaling, as that of YaRN.

    It is `attention_scaling` of the rotary module (https://arxiv.org/abs/2309.00071, section 3.4).
    """
    if not _has_rope(probe):
        return
    modules = probe.reference.model.modules()
    factors = {getattr(module, "attention_scaling", None) for module in modules}
    for factor in factors:
        if not isinstance(factor, int | float) or factor in (0, 1):
            continue

        def turned(turn: Rotation, factor: float = factor) -> tuple[Tensor, Tensor]:
            return turn.rotate(turn.query, turn.key, turn.cos / factor, turn.sin / factor)

        what = f"whose cos and sin of RoPE lack the factor attention_scaling ({factor:.4g})"
        yield ForwardEdit(name="rope.unscaled", sentence=what, rope=turned)


def rope_rounded(probe: FaultProbe) -> Edits:
    """Positions, frequencies or angles are rounded to bfloat16 or float16 before cos and sin."""
    if not _has_rope(probe):
        return
    last = probe.n_rows - 1
    for dtype in (torch.bfloat16, torch.float16):
        name, exact = str(dtype).removeprefix("torch."), int(2 / torch.finfo(dtype).eps)
        roundings = dict(_roundings(dtype))
        what = f"with position ids rounded to {name}, which is exact up to {exact} only, in RoPE"
        if last > exact:  # below, every position id is exact
            yield _rounded(what, roundings["positions"])
        yield _rounded(f"with frequencies of RoPE rounded to {name}", roundings["frequencies"])
        for tables in ("", " and cos"):
            what = f"with angles of RoPE rounded to {name}"
            yield _rounded(what, roundings[f"angles{tables}"])
            what = f"with angles of RoPE computed in {name}, to which position ids are rounded"
            if last > exact:
                what += f" (they are exact up to {exact} only)"
            yield _rounded(what, roundings[f"product{tables}"])


def rope_module_rounded(probe: FaultProbe) -> Edits:
    """The program's own rotary module computes angles in the dtype of the hidden states."""
    rotary = probe.rotary
    if rotary is None:
        return
    positions = torch.arange(probe.n_rows, device=probe.reference.device)[None]
    first = rotary.first_rounded(positions)
    if first is None:
        return

    def turned(turn: Rotation) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.tables(turn.positions, rotary.dtype)
        return turn.rotate(turn.query, turn.key, cos.to(turn.cos.dtype), sin.to(turn.sin.dtype))

    name = str(rotary.dtype).removeprefix("torch.")
    what = f"with the angles that {rotary.title} computes in {name}, to which it rounds position "
    what += f"ids: from position {first} on they are not those that it computes in float32"
    yield ForwardEdit(name="rope.module-rounded", sentence=what, rope=turned)


def _roundings(dtype: torch.dtype) -> Iterator[tuple[str, Angles]]:
    """Yield by what is rounded the way in which angles are computed.

    Cos and sin are those of the dtype of the angles.
    """

    def product(places: Tensor, turns: Tensor) -> Tensor:
        return places[..., None].to(dtype) * turns.to(dtype)

    yield "positions", lambda places, turns: exact_angles(places.to(dtype), turns)
    yield "frequencies", lambda places, turns: exact_angles(places, turns.to(dtype).float())
    yield "angles", lambda places, turns: exact_angles(places, turns).to(dtype).float()
    yield "product", lambda places, turns: product(places, turns).float()
    yield "angles and cos", lambda places, turns: exact_angles(places, turns).to(dtype)
    yield "product and cos", product


def _rounded(sentence: str, angles_of: Angles) -> ForwardEdit:
    def turned(turn: Rotation) -> tuple[Tensor, Tensor]:
        tables = turn.tables(turn.positions, angles_of=angles_of)
        return turn.rotate(turn.query, turn.key, *tables)

    return ForwardEdit(name="rope.rounded", sentence=sentence, rope=turned)


def _moved(turn: Rotation, positions: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return turn.rotate(turn.query, turn.key, *turn.tables(positions(turn.positions)))


def positions_passed(probe: FaultProbe) -> Edits:
    """The position ids are those that the program passed."""
    passed = probe.positions
    if passed is None:
        return
    here = passed[0, probe.first_row :]
    first, last = int(here[0]), int(here[-1])
    span = f"{first}" if first == last else f"{first} to {last}"
    who = "that the program passed"
    if probe.counts_padding:
        who = "that the model makes if none are passed, which count the padding"
    sentence = f"with the position ids {who} ({span}, where the text is at {probe.first_row})"
    yield ForwardEdit(
        name="positions.passed",
        sentence=sentence,
        positions=lambda positions: passed,
        whole_model=True,
    )


def positions_restarted(probe: FaultProbe) -> Edits:
    """Positions begin again at 0, at 1, or at a segment; or all rows of a step have the same."""
    n = probe.n_prompt

    def step_from_0(positions: Tensor) -> Tensor:
        return positions - probe.first_row

    def decode_from_0(positions: Tensor) -> Tensor:
        return positions - n

    starts = torch.tensor([s for s in probe.segment_starts if s < probe.n_rows] or [0])

    def by_segment(positions: Tensor) -> Tensor:
        begin = torch.searchsorted(starts, positions[0].cpu(), right=True) - 1
        return positions - starts[begin.clamp_min(0)].to(positions.device)[None]

    options: dict[str, Callable[[Tensor], Tensor]] = {}
    if probe.is_decode:
        options["with positions that begin again at 0 in each decode step"] = step_from_0
        options["with positions of the generated text that begin again at 0"] = decode_from_0
    else:
        options["with position 1 for every row"] = torch.ones_like
    if not _has_rope(probe):  # to rotate by the angle 0 is not to rotate, see `rope_missing`
        options["with position 0 for every row"] = torch.zeros_like
    if len(starts) > 1 and not probe.is_decode:
        options["with positions that begin again in each declared segment"] = by_segment
    for sentence, change in options.items():
        yield _positions_edit(probe, "positions.restarted", sentence, change)


def positions_shifted(probe: FaultProbe) -> Edits:
    """The rows of the step are some positions too far left or right."""
    shifts = [*range(-3, 0), *range(1, 4)]
    if probe.padding:
        shifts.append(len(probe.padding))
    for k in shifts:
        change: Callable[[Tensor], Tensor] = partial(_shift, k=k)
        where = f"with positions shifted by {k:+d}"
        yield _positions_edit(probe, "positions.shifted", where, change)


def _shift(positions: Tensor, k: int) -> Tensor:
    return (positions + k).clamp_min(0)


def _positions_edit(
    probe: FaultProbe, name: str, sentence: str, change: Callable[[Tensor], Tensor]
) -> ForwardEdit:
    """Return an edit of the rotary tables, by layer; else of the ids that are looked up."""
    if _has_rope(probe):
        return ForwardEdit(name=name, sentence=sentence, rope=partial(_moved, positions=change))
    return ForwardEdit(name=name, sentence=sentence, positions=change, whole_model=True)


HYPOTHESES = (
    positions_passed,
    rope_missing,
    rope_doubled,
    rope_turned,
    positions_restarted,
    rope_of_other_layers,
    positions_shifted,
    rope_base,
    rope_unscaled,
    rope_rounded,
    rope_module_rounded,
)
