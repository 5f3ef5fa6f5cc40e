"""`flexinspect glossary`: what the words of the interface mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flexinspect.cli.output import print_json, stdout_console
from flexinspect.core.errors import UsageError
from flexinspect.core.glossary_terms import TOPICS, Term, read_glossary, search_glossary
from flexinspect.core.text import did_you_mean

DESCRIPTION = """Explain the words of the interface. With a term, explain those that have it
in their name, or else those that mention it. In the interface, G opens the glossary."""

EXAMPLES = """examples:
  flexinspect glossary
  flexinspect glossary margin
  flexinspect glossary "block table"
  flexinspect glossary --json | jq '.[].name'

exit codes: 0 success, 2 unknown term
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("term", metavar="TERM", nargs="*", help="the term, or a part of it")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the terms. Raises `UsageError` for an unknown one."""
    query = " ".join(args.term)
    terms = search_glossary(query)
    if not terms:
        known = [word for term in read_glossary() for word in term.words]
        hint = did_you_mean(query, known, "flexinspect glossary lists all terms.")
        raise UsageError(f"The glossary has no term '{query}'.", hint=hint)
    if args.json:
        print_json(terms)
    else:
        _print_terms(terms, has_headings=not query)
    return 0


def _print_terms(terms: Sequence[Term], *, has_headings: bool) -> None:
    from textwrap import fill, indent

    from rich.text import Text

    console, topic = stdout_console(), ""
    for term in terms:
        if has_headings and term.topic != topic:
            console.print(Text(f"\n{TOPICS[term.topic]}" if topic else TOPICS[term.topic], "cyan"))
            topic = term.topic
        also = f"  ({', '.join(term.also)})" if term.also else ""
        console.print(Text.assemble((term.name, "bold"), (also, "dim")))
        console.print(indent(fill(term.text, max(console.width - 3, 20)), "  "))
