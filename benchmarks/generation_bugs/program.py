"""`python program.py NAME bug|fixed`: one of the programs, as a user's script."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs as a script of a user would
from benchmarks.generation_bugs import attention_bugs, correct, loop_bugs

if __name__ == "__main__":
    name, variant = sys.argv[1:]
    if name in correct.PROGRAMS:
        correct.PROGRAMS[name]()
    else:
        {**attention_bugs.PROGRAMS, **loop_bugs.PROGRAMS}[name](variant == "bug")
