"""`python -m flexinspect_hooks.broken_runs NAME=FILE ...`: build broken runs one after the other.

A name that begins with "!" builds the repaired version. A JSON line on stdout reports each stage of
a run, and as soon as it is finished its name and, if it failed, the error.
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
    from flexinspect_hooks.broken_runs import cache, kernel_faults, masks

    names = ChainMap(vars(cache), vars(kernel_faults), vars(masks))
    function: Callable[..., None] = names[name.replace("-", "_")]
    return function


def build(name: str, out: Path, on_stage: Callable[[str], None]) -> None:
    """Build one broken run, or its repaired version, as a trace at `out`.

    `on_stage` is called with what is being done.

    Raises `UsageError` for a name that is not in the catalog.
    """
    from flexinspect.inputs.broken_run_catalog import find_broken_run

    entry = find_broken_run(name.removeprefix("!"))
    on_stage("importing torch and transformers")
    import torch

    from flexinspect_hooks.broken_runs.broken_run_setup import BrokenRunSetup

    run = run_function(entry.name)
    on_stage("running and recording the program")
    torch._dynamo.reset()  # graphs (and failed traces) of one run must not reach the next
    torch.manual_seed(0)
    run(BrokenRunSetup(f"museum-{entry.name}", out), repaired=name.startswith("!"))


def main(arguments: Sequence[str]) -> int:
    """Build every named run; one that fails does not stop the others."""
    stdout = sys.stdout

    def report(**fact: str) -> None:
        print(json.dumps(fact), file=stdout, flush=True)

    for argument in arguments:
        name, _, out = argument.partition("=")
        error_text = ""
        try:
            with redirect_stdout(sys.stderr):
                build(name, Path(out), lambda stage: report(stage=stage))
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
        report(name=name, error=error_text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
