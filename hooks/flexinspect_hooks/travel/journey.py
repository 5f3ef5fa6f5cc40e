"""One generation that can go back: it decodes, restores, forks and runs under an edited mask.

Restoring never computes what is still there: the cache of the branch, or of one that shares its
beginning, is cropped. Where that is not exact (sliding windows forget keys) or where no cache is
left, the very forwards of the recording are run again, with their rows and their masks, since only
those give the same bits. Steps that the trace holds are not recorded twice: going on from a
restored state is checked against the recording step by step, until it ends or comes out
differently; from there on it is a branch of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flexinspect import maskedits
from flexinspect.errors import UsageError
from flexinspect.maskedits import Edit, EditedRule
from flexinspect.prompts import Segment
from flexinspect_hooks.generate import Decoder, check_tokens, ended, new_cache
from flexinspect_hooks.masksource import MaskSource
from flexinspect_hooks.patching import FlexPatch
from flexinspect_hooks.travel.caches import (
    CacheShelf,
    held_bytes,
    n_rows_of,
    row_bytes,
)
from flexinspect_hooks.travel.conditions import Conditions, checksum
from flexinspect_hooks.travel.editedmask import declared_of, rule_of, source_of
from flexinspect_hooks.travel.lines import Line, StepMark
from flexinspect_hooks.travel.parts import Limits, Price, Restored, Scribe
from flexinspect_hooks.travel.prices import (
    Nearest,
    Sizes,
    nearest,
    restore_price,
    whole_price,
)
from flexinspect_hooks.travel.words import restored_words


class Journey:
    """Drives one generation and its branches; the model's patch takes each branch's mask."""

    def __init__(
        self,
        model: torch.nn.Module,
        decoder: Decoder,
        patch: FlexPatch,
        scribe: Scribe,
        limits: Limits,
        *,
        segments: Sequence[Segment] = (),
    ) -> None:
        self._model, self._decoder, self.patch = model, decoder, patch
        self._scribe, self._limits = scribe, limits
        self._segments = tuple(segments) or decoder.prompt.segments
        self._shelf = CacheShelf()
        self._conditions = Conditions.of(model)
        self._device = next(model.parameters()).device
        self.line = Line(0, patch.source)
        self.lines = [self.line]

    @property
    def step(self) -> int:
        """The last finished step, -1 before the first."""
        return self._decoder.step - 1

    @property
    def is_over(self) -> bool:
        """Whether the live branch has ended, and stands at its end."""
        return bool(self.line.ended) and self._decoder.step >= self.line.n_steps

    @property
    def is_replaying(self) -> bool:
        """Whether the next step is in the trace already."""
        return self._decoder.step < self.line.n_steps

    def held_bytes(self) -> int:
        """Return the bytes of all caches that are alive."""
        return held_bytes([self._decoder.cache, *(cache for _, cache in self._shelf.items())])

    # -- going on --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run one step of the live branch: record it, or check it where it is recorded."""
        line, step = self.line, self._decoder.step
        self._scribe.stand(line.branch, step)
        started = time.perf_counter()
        self._enter(line, step)
        logits = self._decoder.next_logits()
        random = self._decoder.sampler.state()
        choice = self._decoder.choose(logits, line.forced_at(step))
        wall_ms = (time.perf_counter() - started) * 1e3
        mark = StepMark(choice.token_id, random, checksum(logits), wall_ms)
        if step < line.n_steps:
            line = self._checked(line, step, mark)
            if line is self.line:
                self._scribe.drop(line.owner(step))
                return
            self.line = line
        line.marks.append(mark)
        self._scribe.chose(line, choice)
        self._end_if_over(line)

    def _enter(self, line: Line, step: int) -> None:
        """Take the mask of a step, and nothing of the cache where it is computed anew."""
        owner = line.owner(step)
        self.patch.source = owner.source
        if owner.recomputed_at(step):
            self._decoder.stand(self._decoder.token_ids, new_cache(self._model))

    def _checked(self, line: Line, step: int, mark: StepMark) -> Line:
        """Return the line if a step came out as recorded, else a new one that begins with it."""
        if _is_same(line.mark(step), mark):
            return line
        why = self._reasons()
        text = f"Step {step} did not come out as it was recorded. {' '.join(why)}"
        self._scribe.tell("replay-differs", text, line, step, {"why": why})
        parent = line.owner(step)
        new = self._new_line(parent, step, parent.source)
        new.recomputed = parent.recomputed_at(step)
        new.change = {"kind": "replay", "why": why, **_anew(new.recomputed)}
        new.forced = parent.forced[step - parent.fork_step :]
        self._scribe.begin(new)
        # The live cache is the new line's from here on: its newest row is not the recorded one.
        return new

    def _reasons(self) -> list[str]:
        said = self._conditions.changes(Conditions.of(self._model))
        same = (
            "Weights, threads and modes are the same: an operation of the model does not give the "
            f"same bits each time on {self._device.type}."
        )
        return said or [same]

    def _end_if_over(self, line: Line) -> None:
        limits = self._limits
        line.ended = ended(
            self._decoder.token_ids, limits.max_new_tokens, limits.eos_ids, limits.stops
        )
        if line.ended:
            self._close(line, "finished", line.ended)

    def close(self, state: str, reason: str) -> None:
        """End the live branch in `state` unless it has ended, and the others as they were left."""
        for line in self.lines:
            if not line.is_closed:
                is_live = line is self.line
                left = f"left at step {line.n_steps - 1}"
                self._close(line, state if is_live else "interrupted", reason if is_live else left)
        self._shelf.clear()

    def _close(self, line: Line, state: str, reason: str) -> None:
        line.is_closed = True
        self._scribe.end(line, state, reason)

    # -- going back ------------------------------------------------------------------------------

    def restore(self, branch: int, step: int) -> Restored:
        """Stand behind a recorded step of a branch. Raises `UsageError` where there is none."""
        line, started = self._line(branch, step), time.perf_counter()
        price = self.price(branch, step)
        why = self._go(line, step)
        said = " ".join([restored_words(line, step, price.n_rows), *why])
        done = Restored(price, (time.perf_counter() - started) * 1e3, said, why)
        facts = {"rows": price.n_rows, "forwards": price.n_forwards, "ms": round(done.wall_ms, 3)}
        self._scribe.tell("restored", said, line, step, {**facts, "why": list(why)})
        return done

    def price(self, branch: int, step: int) -> Price:
        """Return what `restore` of a step costs. Raises `UsageError` where there is none."""
        line = self._line(branch, step)
        return restore_price(line, step, self._nearest(line, step), self._sizes())

    def _sizes(self) -> Sizes:
        """Return what prices are made of."""
        decoder = self._decoder
        return Sizes(len(decoder.prompt.ids), row_bytes(decoder.cache), self.held_bytes())

    def _nearest(self, line: Line, step: int) -> Nearest:
        """Return what is left of the rows of a step."""
        caches = [(self.line.branch, self._decoder.cache), *self._shelf.items()]
        holders = [(self.lines[branch], cache) for branch, cache in caches]
        return nearest(line, step, holders, len(self._decoder.prompt.ids))

    def _line(self, branch: int, step: int) -> Line:
        line = self.lines[branch] if 0 <= branch < len(self.lines) else None
        if line is None:
            raise UsageError(
                f"There is no branch {branch}; there are {len(self.lines)}, numbered from 0."
            )
        if not 0 <= step < line.n_steps:
            raise UsageError(
                f"Branch {branch} has no step {step}; its steps go from 0 to {line.n_steps - 1}."
            )
        return line

    def _go(self, line: Line, step: int) -> tuple[str, ...]:
        """Stand behind a step of a line; returns why rows are other ones, empty when none is."""
        near, decoder = self._nearest(line, step), self._decoder
        stood = (decoder.token_ids, decoder.cache, decoder.sampler.state())
        self._shelf.use(near.branch)
        self._put_aside(self.line)
        why: tuple[str, ...] = ()
        try:
            if near.cache is not None and near.step == step:
                decoder.stand(line.token_ids(step + 1), near.cache)
            else:
                with self._scribe.muted():
                    why = self._replay(line, step, near)
        except BaseException:  # a forward failed, or was interrupted
            decoder.stand(*stood[:2])
            decoder.sampler.restore(stood[2])
            raise
        decoder.sampler.restore(line.random_after(step))
        self.line = line
        return why

    def _put_aside(self, line: Line) -> None:
        """Keep the cache of a line that is left, and its random state if it is at its end."""
        decoder = self._decoder
        if decoder.step == line.n_steps and line.marks:
            line.random = decoder.sampler.state()
        if n_rows_of(decoder.cache):
            self._shelf.put(line.branch, decoder.cache)

    def _replay(self, line: Line, step: int, near: Nearest) -> tuple[str, ...]:
        """Run the forwards again that lead from a cache to a step."""
        decoder, first = self._decoder, line.origin(step).fork_step
        if near.cache is not None:
            first = near.step + 1
        decoder.stand(line.token_ids(first), near.cache or new_cache(self._model))
        off: list[int] = []
        for number in range(first, step + 1):
            self.patch.source = line.owner(number).source
            mark = line.mark(number)
            if int(checksum(decoder.next_logits())) != int(mark.check):
                off.append(number)
            decoder.token_ids.append(mark.token_id)
        if not off:
            return ()
        return (f"Step {off[0]} did not come out as it was recorded.", *self._reasons())

    # -- going elsewhere -------------------------------------------------------------------------

    def fork(
        self,
        branch: int,
        step: int,
        token_ids: Sequence[int],
        facts: Mapping[str, Any] | None = None,
    ) -> Line:
        """Begin a branch that takes other tokens from a recorded step on, then goes on freely.

        `facts` goes into what the trace says of the change. Raises `UsageError` for a step that
        there is not, for the token that was chosen there, and for one that the model has not.
        """
        line, parent = self._forkable(branch, step, token_ids)
        change = {"kind": "token", "token_id": token_ids[0], "instead_id": line.mark(step).token_id}
        if len(token_ids) > 1:
            change["token_ids"] = list(token_ids)
        recomputed = parent.recomputed_at(step)
        self._go_before(parent, step, recomputed=recomputed)
        new = self._new_line(parent, step, parent.source)
        new.forced, new.recomputed = tuple(token_ids), recomputed
        return self._begun(new, {**change, **_anew(recomputed), **(facts or {})})

    def fork_price(self, branch: int, step: int, token_ids: Sequence[int]) -> Price:
        """Return what a fork costs until its first own step is over. Raises as `fork` does."""
        line, owner = self._forkable(branch, step, token_ids)
        return self._branch_price(line, step, recomputed=owner.recomputed_at(step))

    def _forkable(self, branch: int, step: int, token_ids: Sequence[int]) -> tuple[Line, Line]:
        """Return the line of a branch, and the one that holds the step."""
        line = self._line(branch, step)
        if not token_ids:
            raise UsageError("A fork needs a token to take.")
        check_tokens(self._model, token_ids)
        if tuple(token_ids) == (line.mark(step).token_id,):
            raise UsageError(f"Step {step} chose that token already; a fork needs another one.")
        return line, line.owner(step)

    def replaced(self, branch: int, step: int, token_ids: Sequence[int]) -> int:
        """Return the token that a fork takes others for. Raises as `fork` does."""
        return self._forkable(branch, step, token_ids)[0].mark(step).token_id

    def edit(self, branch: int, step: int, edits: Sequence[Edit]) -> Line:
        """Begin a branch whose first own step is `step`, under an edited mask.

        Raises `UsageError` for a step that there is not, `MaskError` for what cannot be edited.
        """
        line = self._line(branch, step)
        parent = line.owner(step)
        said = [maskedits.named(edit, self._segments) for edit in edits]
        rule, changed = self._edited(parent.source, said, step)
        source = self._source(rule, " + ".join([parent.source.name, *map(str, said)]))
        recomputed = changed > 0 or parent.recomputed_at(step)
        self._go_before(parent, step, recomputed=recomputed)
        new = self._new_line(parent, step, source)
        new.recomputed = recomputed
        about = {"rule": source.name, "recomputed": new.recomputed, "changed_rows": changed}
        meant = {"declared": declared_of(source)}
        return self._begun(new, {"kind": "mask", "edits": [*map(str, said)], **about, **meant})

    def edit_price(self, branch: int, step: int, edits: Sequence[Edit]) -> tuple[Price, int]:
        """Return what an edit costs until its first own step is over, and how many rows change.

        Those are rows computed already. Raises as `edit` does.
        """
        line = self._line(branch, step)
        owner = line.owner(step)
        said = [maskedits.named(edit, self._segments) for edit in edits]
        changed = self._edited(owner.source, said, step)[1]
        recomputed = changed > 0 or owner.recomputed_at(step)
        return self._branch_price(line, step, recomputed=recomputed), changed

    def _edited(
        self, source: MaskSource, edits: Sequence[Edit], step: int
    ) -> tuple[EditedRule, int]:
        """Return the edited rule, and how many rows it changes that are computed already.

        Those are the rows of earlier steps; of step 0, which feeds the prompt, its own.
        """
        before = rule_of(source, self._device)
        after = maskedits.apply(edits, before, self._segments)
        n_prompt = len(self._decoder.prompt.ids)
        n_before = n_prompt + step - 1 if step else n_prompt
        return after, len(maskedits.changed_rows(before, after, n_before))

    def _source(self, rule: EditedRule, name: str) -> MaskSource:
        length, compiled = self._segments[-1].stop, self.patch.compiled
        return source_of(rule, name=name, length=length, device=self._device, compiled=compiled)

    def _branch_price(self, line: Line, step: int, *, recomputed: bool) -> Price:
        """Return what going before a step costs, and the forward of that step."""
        if recomputed or not step:
            return whole_price(line, step, self._sizes())
        before, own = self.price(line.branch, step - 1), line.mark(step).wall_ms
        n_rows, n_forwards = before.n_rows + 1, before.n_forwards + 1
        return replace(before, n_rows=n_rows, n_forwards=n_forwards, ms=before.ms + own)

    def _new_line(self, parent: Line, step: int, source: MaskSource) -> Line:
        new = Line(len(self.lines), source, parent, step)
        self.lines.append(new)
        return new

    def _go_before(self, parent: Line, step: int, *, recomputed: bool) -> None:
        """Stand before a step that a new line is to take over."""
        random = parent.mark(step).random
        if step and not recomputed:
            self._go(parent, step - 1)
        else:  # its first forward feeds the whole sequence
            self._put_aside(self.line)
            self._decoder.stand(parent.token_ids(step), new_cache(self._model))
        self._decoder.sampler.restore(random)

    def _begun(self, new: Line, change: Mapping[str, Any]) -> Line:
        """Record that a new line begins; it is the live one."""
        self.line, new.change = new, change
        self._scribe.begin(new)
        return new


def _anew(recomputed: bool) -> dict[str, bool]:
    """Return what a change says of a first own step that fed the whole sequence."""
    return {"recomputed": True} if recomputed else {}


def _is_same(one: StepMark, other: StepMark) -> bool:
    return one.token_id == other.token_id and int(one.check) == int(other.check)
