"""Reading the pages of the documentation: their code, and text that may have other numbers."""

from __future__ import annotations

import re
from typing import Any


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def run_python(page: str) -> dict[str, Any]:
    """Run the Python of a page, block by block in one namespace, and return that."""
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(block, names)
    return names


def commands(page: str) -> list[str]:
    """Return what follows `$ flexinspect` in each example of a command."""
    return re.findall(r"^\$ flexinspect (.*)$", page, re.MULTILINE)


def without_digits(text: str) -> str:
    """Return text with "#" for each number."""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)
