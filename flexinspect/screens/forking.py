"""Asking which token a step should choose instead."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from flexinspect.errors import FlexInspectError
from flexinspect.panels.base import Place
from flexinspect.panels.parts.logitswords import probability, word
from flexinspect.records import Candidate
from flexinspect.screens.ask import Ask, Choose
from flexinspect.trace.ranges import holder
from flexinspect.trace.reader import TraceReader

OTHER = "other"


@dataclass(frozen=True, slots=True)
class Token:
    """A token by its id, or a text whose tokens are all to be forced."""

    token_id: int | None = None
    text: str | None = None


async def ask_token(app: Any, reader: TraceReader, place: Place) -> Token | None:
    """Let the user choose a candidate of the step or type something; None when they leave it."""
    try:
        found = await asyncio.to_thread(_candidates, reader, place)
    except FlexInspectError as error:
        app.notify(error.sentence(), severity="error", markup=False)
        return None
    options = [(str(one.token_id), _line(one)) for one in found]
    question = f"Go on from step {place.step} with another token"
    options.append((OTHER, "… type a token or a text"))
    answer = await app.push_screen_wait(Choose(question, options))
    if answer is None:
        return None
    if answer != OTHER:
        return Token(token_id=int(answer))
    typed = await app.push_screen_wait(
        Ask("A text, whose tokens are forced in order, or #ID for one token", placeholder=" Paris")
    )
    return token_of(typed) if typed else None


def token_of(typed: str) -> Token:
    """Return what was typed: "#123" is a token's id, anything else a text."""
    by_id = re.fullmatch(r"\s*#(\d{1,9})\s*", typed)
    return Token(token_id=int(by_id[1])) if by_id else Token(text=typed)


def _candidates(reader: TraceReader, place: Place) -> list[Candidate]:
    branch = holder(reader, place.generation, place.step, place.branch)
    chosen = reader.logits(place.generation, place.step, branch)
    found = reader.candidates(place.generation, place.step, branch)
    return [one for one in found if chosen is None or one.token_id != chosen.chosen_id]


def _line(one: Candidate) -> str:
    return f"{one.rank:>3}  {word(one.text, one.token_id):<24} {probability(one.logprob):7.2%}"
