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
from flexinspect.core.text import did_you_mean

_MODULES = {
    "isolation": "isolation",
    "order": "segment_order",
    "kernel": "kernel_weights",
    "cache": "cache_check",
}
_UNUSED = {"order": {"mask"}, "kernel": {"mask"}, "cache": {"mask", "segments"}}
"""Options of `subject_of` that a kind of proof does not take."""


def prove(kind: str, model: Any, ids: Any, **options: Any) -> Proof:
    """Prove a property of a model by running it on `ids`.

    `kind` is one of "isolation" (changing a segment moves no row that must not attend to it),
    "order" (how far the next token's logits move when two segments are swapped), "kernel" (the
    weights that the kernel used equal those that are drawn) and "cache" (steps with the cache equal
    a full recompute). The options are the keyword arguments of `proof_subject.subject_of`, which
    describes the run, and of `check_isolation`, `check_order`, `check_kernel` and `check_cache`;
    docs/proofs.md lists them.

    Raises `UsageError` for an unknown kind or option, and for a run that cannot be proved.
    """
    from flexinspect_hooks.proofs.proof_subject import subject_of  # loads torch

    of_subject, of_check = options_of(kind)
    known = [*of_subject, *of_check]
    for name in options:
        if name not in known:
            matches = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {matches[0]}=?" if matches else f"It takes {', '.join(known)}."
            raise UsageError(f"A proof of kind '{kind}' takes no option {name}=.", hint=hint)
    subject = subject_of(model, ids, **{n: options.pop(n) for n in of_subject if n in options})
    return check_of(kind)(subject, **options)


def options_of(kind: str) -> tuple[list[str], list[str]]:
    """The options of a kind of proof that describe the run, and those of the check itself.

    Raises `UsageError` for an unknown kind.
    """
    from flexinspect_hooks.proofs.proof_subject import subject_of  # loads torch

    _, *of_check = inspect.signature(check_of(kind)).parameters
    _, _, *of_subject = inspect.signature(subject_of).parameters
    return [name for name in of_subject if name not in _UNUSED.get(kind, ())], of_check


def check_of(kind: str) -> Callable[..., Proof]:
    """The function that proves a subject. Raises `UsageError` for an unknown kind."""
    if kind not in PROOF_KINDS:
        raise UsageError(
            f"There is no proof '{kind}'; the proofs are {', '.join(PROOF_KINDS)}.",
            hint=did_you_mean(str(kind), PROOF_KINDS),
        )
    module = import_module(f"{__name__}.{_MODULES[kind]}")
    check: Callable[..., Proof] = getattr(module, f"check_{kind}")
    return check
