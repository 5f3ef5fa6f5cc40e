"""Faults on purpose, again and again: kills, errors of the disk, damaged traces, hostile input.

    python -m tools.torture [PART ...] [--minutes N] [--first-seed N] [--seeds N] [--out FILE]

`parts` lists the parts. A part has a module with two functions: one prepares a process, the other
attempts one seed and returns what went wrong. A seed does the same on each machine, except where it
is about moments. `docs/reliability.md` says what was tried and what was found.
"""
