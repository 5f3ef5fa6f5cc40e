"""Calls of FlexAttention outside of any model whose rows are masked without their offset."""

from __future__ import annotations

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.records import StepRecord
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.views import step_mask_views

NO_OFFSET = "decode.no-offset"


def check_standalone_call(step: StepRecord, context: RuleContext) -> list[Finding]:
    """Say so when all rows of a call outside of a model are masked from the upper left.

    A call of a single row that opens key 0 of several has no other reading; of more rows it may be
    meant, so that is a note.
    """
    found = []
    for view in step_mask_views(step, context)[0]:
        n_rows, n_keys = view.cells.shape[1:]
        cells = view.cells
        if n_rows >= n_keys or n_keys < 3 or cells[:, -1, n_rows:].any():
            continue
        if not (cells == np.tri(n_rows, n_keys, dtype=np.bool_)).all():
            continue
        one = n_rows == 1
        rows = "The one row of this call sees" if one else f"The {n_rows} rows of this call see"
        keys = "1" if one else f"1 to {n_rows}"
        sentence = (
            f"{rows} {keys} of {n_keys} keys, the first one{'' if one else 's'}: a mask over keys "
            f"of a cache counts its rows from 0, while {n_keys - n_rows} keys come before them "
            f"(with that offset the last row sees {n_keys})."
        )
        found.append(
            Finding(
                id=NO_OFFSET,
                severity=Severity.WARNING if one else Severity.NOTE,
                sentence=sentence,
                generation=step.generation,
                branch=step.branch,
                step=step.step,
                layer=view.layers[0],
                positions=(view.newest_pos,),
                evidence={
                    "keys": n_keys,
                    "seen": n_rows,
                    "expected": n_keys,
                    "mask": view.fingerprint,
                },
            )
        )
    return found
