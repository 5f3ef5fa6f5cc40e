"""`python -m flexinspect_hooks.broken_runs NAME=FILE ...`: build broken runs one after the other.

A name that begins with "!" builds the repaired version. As soon as a run is finished, one JSON line
on stdout reports its name and, if it failed, the error.
"""

from __future__ import annotations

import json
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path


def run_function(name: str) -> Callable[..., None]:
    """Return the function of a broken run, which is in one of the modules by subject."""
    from flexinspect_hooks.broken_runs import cache, kernels, masks

    names = ChainMap(vars(cache), vars(kernels), vars(masks))
    function: Callable[..., None] = names[name.replace("-", "_")]
    return function


def build(name: str, out: Path) -> None:
    """Build one broken run, or its repaired version, as a trace at `out`.

    Raises `UsageError` for a name that is not in the catalog.
    """
    import torch

    from flexinspect.inputs.broken_run_catalog import find_broken_run
    from flexinspect_hooks.broken_runs.broken_run_setup import BrokenRunSetup

    entry = find_broken_run(name.removeprefix("!"))
    run = run_function(entry.name)
    torch._dynamo.reset()  # graphs (and failed traces) of one run must not reach the next
    torch.manual_seed(0)
    run(BrokenRunSetup(f"museum-{entry.name}", out), repaired=name.startswith("!"))


def main(arguments: Sequence[str]) -> int:
    """Build every named run; one that fails does not stop the others."""
    for argument in arguments:
        name, _, out = argument.partition("=")
        result = {"name": name, "error": ""}
        try:
            with redirect_stdout(sys.stderr):
                build(name, Path(out))
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
