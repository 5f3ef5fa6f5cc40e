"""Faults on purpose, again and again: damaged traces through every command.

    python -m tools.torture [--minutes N] [--first-seed N] [--seeds N] [--out FILE]

Each seed makes one damaged trace, whichever machine it runs on, and reads it with every command
that reads traces. `docs/reliability.md` says what was tried and what was found.
"""
