"""Proofs by experiment: they run the model with changes and measure what moves.

Importing this package does not load torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from flexinspect.analysis.proof_results import PROOF_KINDS, Proof
from flexinspect.core.errors import UsageError

_MODULES = {
    "isolation": "isolation",
    "order": "segment_order",
    "kernel": "kernel_weights",
    "cache": "cache_check",
}


def prove(kind: str, model: Any, ids: Any, **options: Any) -> Proof:
    """Prove a property of a model by running it on `ids`.

    `kind` is one of "isolation" (changing a segment moves no row that must not attend to it),
    "order" (how far the next token's logits move when two segments are swapped), "kernel" (the
    weights that the kernel used equal those that are drawn) and "cache" (steps with the cache equal
    a full recompute). The options are the keyword arguments of `prove_isolation`, `prove_order`,
    `prove_kernel` and `prove_cache`; docs/proofs.md lists them.

    Raises `UsageError` for an unknown kind or option, and for a run that cannot be proved.
    """
    prover = prover_of(kind)
    known = [name for name in inspect.signature(prover).parameters if name not in ("model", "ids")]
    for name in options:
        if name not in known:
            matches = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {matches[0]}=?" if matches else f"It takes {', '.join(known)}."
            raise UsageError(f"A proof of kind '{kind}' takes no option {name}=.", hint=hint)
    proof: Proof = prover(model, ids, **options)
    return proof


def prover_of(kind: str) -> Callable[..., Any]:
    """The function of a kind of proof. Raises `UsageError` for an unknown kind."""
    if kind not in PROOF_KINDS:
        matches = difflib.get_close_matches(str(kind), PROOF_KINDS, 1)
        raise UsageError(
            f"There is no proof '{kind}'; the proofs are {', '.join(PROOF_KINDS)}.",
            hint=f"Did you mean {matches[0]}?" if matches else None,
        )
    module = import_module(f"{__name__}.{_MODULES[kind]}")
    prover: Callable[..., Any] = getattr(module, f"prove_{kind}")
    return prover
