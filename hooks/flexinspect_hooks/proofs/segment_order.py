"""Order, tested: swap two segments of one length, and measure the next token's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from flexinspect.analysis.proof_results import ORDER, Proof, format_amount, proof_finding
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding
from flexinspect.records.prompt import SegmentKind
from flexinspect_hooks.proofs.proof_subject import OnProgress, Subject

Prompt = TypeVar("Prompt")

_MAX_EQUAL_CHANGE = 1e-3
"""Logits that move less than this do not depend on the order (measured: 3e-6, against 5.8)."""


class _Swap(NamedTuple):
    """Two swapped segments: how far the logits moved, and the best token before and after."""

    first: str
    second: str
    moved: float
    best: int
    best_swapped: int


def check_order(subject: Subject) -> Proof:
    """Swap each pair of segments of one length, and measure how far the next token's logits move.

    A dependence on the order is not an error: with positions that continue over all segments, one
    segment is nearer to the answer than another, and this proof measures the effect.

    Raises `UsageError` if no two paraphrases have the same number of tokens.
    """
    named = [s for s in subject.context.segments if s.kind is SegmentKind.PARAPHRASE]
    swapped = []
    for one, other in combinations(named, 2):
        if len(one) == len(other):
            ids = subject.ids.clone()
            ids[0, one.start : one.stop] = subject.ids[0, other.start : other.stop]
            ids[0, other.start : other.stop] = subject.ids[0, one.start : one.stop]
            swapped.append((one.label, other.label, ids))
    if not swapped:
        raise UsageError(
            "No two segments have the same number of tokens, so none can be swapped in ids.",
            hint="Declare at least two segments of equal length (--declare FILE, or segments= in "
            "Python). Without a program, `flexinspect prove order --prompt … --prompt …` swaps "
            "whole texts.",
        )

    def run(ids: Tensor) -> Tensor:
        return newest_logits(subject.model, subject.n_rows, lambda: subject.forward(ids))

    positions = subject.context.generation.positions
    return prove_order(run, subject.ids, swapped, positions, subject.text_of, subject.report)


def prove_order(
    run: Callable[[Prompt], Tensor],
    prompt: Prompt,
    swapped: Sequence[tuple[str, str, Prompt]],
    positions: str,
    text_of: Callable[[int], str],
    report: OnProgress,
) -> Proof:
    """Compare the next token's logits (vocabulary,), which `run` returns, with each swap's.

    `swapped` are the names of the two segments and the prompt with both swapped; `positions` is the
    mode of the position ids.
    """
    before, swaps = run(prompt), []
    for number, (first, second, other) in enumerate(swapped):
        report(f"swapping {first} and {second}", number / len(swapped))
        after = run(other)
        moved = float((before.float() - after.float()).abs().max())
        swaps.append(_Swap(first, second, moved, int(before.argmax()), int(after.argmax())))
    lines = [f"order under {positions} positions: {plural(len(swaps), 'pair')} swapped"]
    for swap in swaps:
        chosen = (
            "the same token is chosen"
            if swap.best == swap.best_swapped
            else f"{text_of(swap.best)!r} becomes {text_of(swap.best_swapped)!r}"
        )
        lines.append(
            f"  {printable(swap.first)} and {printable(swap.second)}: logits move by up to "
            f"{format_amount(swap.moved)}, {chosen}"
        )
    facts = {"positions": positions, "swaps": [swap._asdict() for swap in swaps]}
    return Proof("order", tuple(lines), (_order_finding(swaps, positions),), facts)


def _order_finding(swaps: Sequence[_Swap], positions: str) -> Finding:
    worst = max(swaps, key=lambda swap: swap.moved)
    n_flipped = sum(swap.best != swap.best_swapped for swap in swaps)
    if worst.moved <= _MAX_EQUAL_CHANGE:
        sentence = (
            f"The order of the segments does not matter: {plural(len(swaps), 'pair')} swapped, "
            f"the next token's logits move by at most {format_amount(worst.moved)}."
        )
    else:
        sentence = (
            f"Swapping {printable(worst.first)} and {printable(worst.second)} moves the next "
            f"token's logits by up to {format_amount(worst.moved)} ({positions} positions); "
            f"{n_flipped} of {plural(len(swaps), 'swap')} choose{'s' * (n_flipped == 1)} "
            "another token."
        )
    evidence = {"moved": worst.moved, "flipped": n_flipped, "positions": positions}
    return proof_finding(ORDER, sentence, evidence=evidence)


def newest_logits(model: nn.Module, n_rows: int, run: Callable[[], object]) -> Tensor:
    """Run, and return the logits (vocabulary,) after the first `n_rows` rows of batch row 0.

    Raises `UsageError` if no forward pass of the model returns logits.
    """
    captured: list[Tensor] = []
    n_passed = 0

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        nonlocal n_passed
        ids = kwargs.get("input_ids", args[0] if args else None)
        n_passed += ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 else n_rows
        logits = getattr(out, "logits", out)
        is_logits = isinstance(logits, Tensor) and logits.dim() == 3
        if n_passed >= n_rows and not captured and is_logits:
            captured.append(logits[0, -1].detach().clone())

    with model.register_forward_hook(after, with_kwargs=True), torch.no_grad():
        run()
    if not captured:
        raise UsageError("The run gave no logits, but the order proof compares the next token's.")
    return captured[0]
