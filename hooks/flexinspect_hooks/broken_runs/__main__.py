"""`python -m flexinspect_hooks.broken_runs NAME=FILE ...`: build exhibits, one after the other.

A name that begins with "!" is the repaired twin. On stdout comes a line for each as it is done:
the name, and the error if it failed.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path


def build(name: str, out: Path) -> None:
    """Build one exhibit, or its repaired twin, as a trace at `out`."""
    import torch

    from flexinspect.inputs.broken_run_catalog import find_broken_run
    from flexinspect_hooks.broken_runs.kit import BrokenRunSetup

    about = find_broken_run(name.removeprefix("!"))
    play = importlib.import_module(f"flexinspect_hooks.broken_runs.{about.module}")
    torch._dynamo.reset()  # what one exhibit has compiled, and broken, is none of the next one's
    torch.manual_seed(0)
    play.run(BrokenRunSetup(f"museum-{about.name}", out), repaired=name.startswith("!"))


def main(arguments: Sequence[str]) -> int:
    """Build what is named; an exhibit that fails does not keep the others from being built."""
    for word in arguments:
        name, _, out = word.partition("=")
        said = {"name": name, "error": ""}
        try:
            with redirect_stdout(sys.stderr):
                build(name, Path(out))
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
