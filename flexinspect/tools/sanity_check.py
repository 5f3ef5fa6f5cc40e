"""`python -m flexinspect.tools.sanity_check`: check a kernel on every configuration of a table.

It is `flexinspect kernels` with other defaults: all configurations, unless `--config` names some,
and `--diff` for the number of differing elements per row. With `--range` the inputs are
q = 0, 1, 2, ..., k = -q and v = q.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flexinspect.cli.main import main as run_command

_NO_CONFIG_NEEDED = ("--config", "--list", "--trace")


def command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `flexinspect` for those of the sanity check."""
    given = ["--picture" if word == "--diff" else word for word in arguments]
    names = {word.partition("=")[0] for word in given}
    defaults = [] if names.intersection(_NO_CONFIG_NEEDED) else ["--config", "all"]
    return ["kernels", *given, *defaults]


def main() -> int:
    """Run the check and return the exit code of `flexinspect kernels`."""
    return run_command(command(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
