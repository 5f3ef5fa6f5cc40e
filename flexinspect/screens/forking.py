"""Asking which token a step should choose instead."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from flexinspect.errors import FlexInspectError
from flexinspect.panels.base import TracePlace
from flexinspect.panels.parts.logitswords import probability, token_label
from flexinspect.records import Candidate
from flexinspect.screens.ask import ChoiceDialog, TextDialog
from flexinspect.trace.ranges import branch_of_step
from flexinspect.trace.reader import TraceReader

OTHER = "other"


@dataclass(frozen=True, slots=True)
class ForcedToken:
    """A token by its id, or a text whose tokens are all to be forced."""

    token_id: int | None = None
    text: str | None = None


async def ask_token(app: Any, reader: TraceReader, place: TracePlace) -> ForcedToken | None:
    """Let the user choose a candidate of the step or type something; None when they leave it."""
    try:
        found = await asyncio.to_thread(_load_candidates, reader, place)
    except FlexInspectError as error:
        app.notify(error.sentence(), severity="error", markup=False)
        return None
    options = [(str(one.token_id), _format_candidate(one)) for one in found]
    question = f"Go on from step {place.step} with another token"
    options.append((OTHER, "… type a token or a text"))
    answer = await app.push_screen_wait(ChoiceDialog(question, options))
    if answer is None:
        return None
    if answer != OTHER:
        return ForcedToken(token_id=int(answer))
    typed = await app.push_screen_wait(
        TextDialog(
            "A text, whose tokens are forced in order, or #ID for one token", placeholder=" Paris"
        )
    )
    return parse_forced_token(typed) if typed else None


def parse_forced_token(typed: str) -> ForcedToken:
    """Return what was typed: "#123" is a token's id, anything else a text."""
    by_id = re.fullmatch(r"\s*#(\d{1,9})\s*", typed)
    return ForcedToken(token_id=int(by_id[1])) if by_id else ForcedToken(text=typed)


def _load_candidates(reader: TraceReader, place: TracePlace) -> list[Candidate]:
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    chosen = reader.logits(place.generation, place.step, branch)
    found = reader.candidates(place.generation, place.step, branch)
    return [one for one in found if chosen is None or one.token_id != chosen.chosen_id]


def _format_candidate(one: Candidate) -> str:
    return (
        f"{one.rank:>3}  {token_label(one.text, one.token_id):<24} {probability(one.logprob):7.2%}"
    )
