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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural
from flexinspect.masks import edits as maskedits
from flexinspect.masks.edits import Edit, PatchedMask
from flexinspect.records.prompt import Segment
from flexinspect_hooks.generation.decoding import (
    Choice,
    Decoder,
    check_tokens,
    find_stop_reason,
    new_cache,
)
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource
from flexinspect_hooks.rewind.branch_state import (
    BranchState,
    RunConditions,
    StepCheckpoint,
    checksum,
)
from flexinspect_hooks.rewind.cache_shelf import (
    CacheStore,
    cache_bytes,
    can_crop,
    crop_cache,
    n_rows_of,
    row_bytes,
)
from flexinspect_hooks.rewind.edited_mask import declared_mask, editable_mask, make_mask_source


class BranchingDecoder:
    """Drives one generation and its branches; the model's patch takes each branch's mask."""

    def __init__(
        self,
        model: torch.nn.Module,
        decoder: Decoder,
        patch: FlexPatch,
        recorder: BranchRecorder,
        criteria: StopCriteria,
        *,
        segments: Sequence[Segment] = (),
    ) -> None:
        self._model, self._decoder, self.patch = model, decoder, patch
        self._recorder, self._criteria = recorder, criteria
        self._segments = tuple(segments) or decoder.prompt.segments
        self._cache_store = CacheStore()
        self._conditions = RunConditions.current(model)
        self._device = next(model.parameters()).device
        self.current_branch = BranchState(0, patch.source)
        self.branches = [self.current_branch]

    @property
    def step(self) -> int:
        """The last finished step, -1 before the first."""
        return self._decoder.step - 1

    @property
    def is_over(self) -> bool:
        """Whether the live branch has ended, and stands at its end."""
        return (
            bool(self.current_branch.end_reason)
            and self._decoder.step >= self.current_branch.n_steps
        )

    @property
    def is_replaying(self) -> bool:
        """Whether the next step is in the trace already."""
        return self._decoder.step < self.current_branch.n_steps

    def cache_bytes(self) -> int:
        """Return the bytes of all caches that are alive."""
        return cache_bytes(
            [self._decoder.cache, *(cache for _, cache in self._cache_store.items())]
        )

    # -- going on --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run one step of the live branch: record it, or check it where it is recorded."""
        line, step = self.current_branch, self._decoder.step
        self._recorder.set_next_step(line.number, step)
        started = time.perf_counter()
        self._prepare_step(line, step)
        logits = self._decoder.next_logits()
        random = self._decoder.sampler.state()
        choice = self._decoder.choose(logits, line.forced_at(step))
        wall_ms = (time.perf_counter() - started) * 1e3
        mark = StepCheckpoint(choice.token_id, random, checksum(logits), wall_ms)
        if step < line.n_steps:
            line = self._check_replayed(line, step, mark)
            if line is self.current_branch:
                self._recorder.drop_step(line.owner(step))
                return
            self.current_branch = line
        line.checkpoints.append(mark)
        self._recorder.on_token_chosen(line, choice)
        self._end_if_over(line)

    def _prepare_step(self, branch: BranchState, step: int) -> None:
        """Take the mask of a step, and nothing of the cache where it is computed anew."""
        owner = branch.owner(step)
        self.patch.source = owner.source
        if owner.recomputed_at(step):
            self._decoder.set_state(self._decoder.token_ids, new_cache(self._model))

    def _check_replayed(self, branch: BranchState, step: int, mark: StepCheckpoint) -> BranchState:
        """Return the line if a step came out as recorded, else a new one that begins with it."""
        if _is_same_step(branch.checkpoint(step), mark):
            return branch
        why = self._difference_reasons()
        text = f"Step {step} did not come out as it was recorded. {' '.join(why)}"
        self._recorder.record_event("replay-differs", text, branch, step, {"why": why})
        parent = branch.owner(step)
        new = self._new_branch(parent, step, parent.source)
        new.recomputed = parent.recomputed_at(step)
        new.change = {"kind": "replay", "why": why, **_recomputed_fact(new.recomputed)}
        new.forced = parent.forced[step - parent.fork_step :]
        self._recorder.begin_branch(new)
        # The live cache is the new line's from here on: its newest row is not the recorded one.
        return new

    def _difference_reasons(self) -> list[str]:
        said = self._conditions.changes(RunConditions.current(self._model))
        same = (
            "Weights, threads and modes are the same: an operation of the model does not give the "
            f"same bits each time on {self._device.type}."
        )
        return said or [same]

    def _end_if_over(self, branch: BranchState) -> None:
        limits = self._criteria
        branch.end_reason = find_stop_reason(
            self._decoder.token_ids, limits.max_new_tokens, limits.eos_ids, limits.should_stop
        )
        if branch.end_reason:
            self._close_branch(branch, "finished", branch.end_reason)

    def close(self, state: str, reason: str) -> None:
        """End the live branch in `state` unless it has ended, and the others as they were left."""
        for line in self.branches:
            if not line.is_closed:
                is_live = line is self.current_branch
                left = f"left at step {line.n_steps - 1}"
                self._close_branch(
                    line, state if is_live else "interrupted", reason if is_live else left
                )
        self._cache_store.clear()

    def _close_branch(self, branch: BranchState, state: str, reason: str) -> None:
        branch.is_closed = True
        self._recorder.end_branch(branch, state, reason)

    # -- going back ------------------------------------------------------------------------------

    def restore(self, branch: int, step: int) -> RestoreResult:
        """Stand behind a recorded step of a branch. Raises `UsageError` where there is none."""
        line, started = self._find_branch(branch, step), time.perf_counter()
        price = self.restore_cost(branch, step)
        why = self._restore_step(line, step)
        said = " ".join([describe_restore(line, step, price.n_rows), *why])
        done = RestoreResult(price, (time.perf_counter() - started) * 1e3, said, why)
        facts = {"rows": price.n_rows, "forwards": price.n_forwards, "ms": round(done.wall_ms, 3)}
        self._recorder.record_event("restored", said, line, step, {**facts, "why": list(why)})
        return done

    def restore_cost(self, branch: int, step: int) -> RestoreCost:
        """Return what `restore` of a step costs. Raises `UsageError` where there is none."""
        line = self._find_branch(branch, step)
        return restore_cost(line, step, self._nearest_cache(line, step), self._cache_sizes())

    def _cache_sizes(self) -> CacheSizes:
        """Return what prices are made of."""
        decoder = self._decoder
        return CacheSizes(len(decoder.prompt.ids), row_bytes(decoder.cache), self.cache_bytes())

    def _nearest_cache(self, line: BranchState, step: int) -> NearestCache:
        """Return what is left of the rows of a step."""
        caches = [(self.current_branch.number, self._decoder.cache), *self._cache_store.items()]
        holders = [(self.branches[branch], cache) for branch, cache in caches]
        return find_nearest_cache(line, step, holders, len(self._decoder.prompt.ids))

    def _find_branch(self, branch: int, step: int) -> BranchState:
        line = self.branches[branch] if 0 <= branch < len(self.branches) else None
        if line is None:
            raise UsageError(
                f"There is no branch {branch}; there are {len(self.branches)}, numbered from 0."
            )
        if not 0 <= step < line.n_steps:
            raise UsageError(
                f"Branch {branch} has no step {step}; its steps go from 0 to {line.n_steps - 1}."
            )
        return line

    def _restore_step(self, branch: BranchState, step: int) -> tuple[str, ...]:
        """Stand behind a step of a line; returns why rows are other ones, empty when none is."""
        near, decoder = self._nearest_cache(branch, step), self._decoder
        stood = (decoder.token_ids, decoder.cache, decoder.sampler.state())
        self._cache_store.mark_used(near.branch)
        self._store_cache(self.current_branch)
        why: tuple[str, ...] = ()
        try:
            if near.cache is not None and near.step == step:
                decoder.set_state(branch.token_ids(step + 1), near.cache)
            else:
                with self._recorder.no_capture():
                    why = self._replay(branch, step, near)
        except BaseException:  # a forward failed, or was interrupted
            decoder.set_state(*stood[:2])
            decoder.sampler.restore(stood[2])
            raise
        decoder.sampler.restore(branch.rng_state_after(step))
        self.current_branch = branch
        return why

    def _store_cache(self, branch: BranchState) -> None:
        """Keep the cache of a line that is left, and its random state if it is at its end."""
        decoder = self._decoder
        if decoder.step == branch.n_steps and branch.checkpoints:
            branch.rng_state = decoder.sampler.state()
        if n_rows_of(decoder.cache):
            self._cache_store.put(branch.number, decoder.cache)

    def _replay(self, branch: BranchState, step: int, nearest: NearestCache) -> tuple[str, ...]:
        """Run the forwards again that lead from a cache to a step."""
        decoder, first = self._decoder, branch.cache_origin(step).fork_step
        if nearest.cache is not None:
            first = nearest.step + 1
        decoder.set_state(branch.token_ids(first), nearest.cache or new_cache(self._model))
        off: list[int] = []
        for number in range(first, step + 1):
            self.patch.source = branch.owner(number).source
            mark = branch.checkpoint(number)
            if int(checksum(decoder.next_logits())) != int(mark.logits_checksum):
                off.append(number)
            decoder.token_ids.append(mark.token_id)
        if not off:
            return ()
        return (f"Step {off[0]} did not come out as it was recorded.", *self._difference_reasons())

    # -- going elsewhere -------------------------------------------------------------------------

    def fork(
        self,
        branch: int,
        step: int,
        token_ids: Sequence[int],
        facts: Mapping[str, Any] | None = None,
    ) -> BranchState:
        """Begin a branch that takes other tokens from a recorded step on, then goes on freely.

        `facts` goes into what the trace says of the change. Raises `UsageError` for a step that
        there is not, for the token that was chosen there, and for one that the model has not.
        """
        line, parent = self._check_fork(branch, step, token_ids)
        change = {
            "kind": "token",
            "token_id": token_ids[0],
            "instead_id": line.checkpoint(step).token_id,
        }
        if len(token_ids) > 1:
            change["token_ids"] = list(token_ids)
        recomputed = parent.recomputed_at(step)
        self._restore_before(parent, step, recomputed=recomputed)
        new = self._new_branch(parent, step, parent.source)
        new.forced, new.recomputed = tuple(token_ids), recomputed
        return self._begin_branch(new, {**change, **_recomputed_fact(recomputed), **(facts or {})})

    def fork_cost(self, branch: int, step: int, token_ids: Sequence[int]) -> RestoreCost:
        """Return what a fork costs until its first own step is over. Raises as `fork` does."""
        line, owner = self._check_fork(branch, step, token_ids)
        return self._branch_cost(line, step, recomputed=owner.recomputed_at(step))

    def _check_fork(
        self, branch: int, step: int, token_ids: Sequence[int]
    ) -> tuple[BranchState, BranchState]:
        """Return the line of a branch, and the one that holds the step."""
        line = self._find_branch(branch, step)
        if not token_ids:
            raise UsageError("A fork needs a token to take.")
        check_tokens(self._model, token_ids)
        if tuple(token_ids) == (line.checkpoint(step).token_id,):
            raise UsageError(f"Step {step} chose that token already; a fork needs another one.")
        return line, line.owner(step)

    def replaced_token(self, branch: int, step: int, token_ids: Sequence[int]) -> int:
        """Return the token that a fork takes others for. Raises as `fork` does."""
        return self._check_fork(branch, step, token_ids)[0].checkpoint(step).token_id

    def edit_mask(self, branch: int, step: int, edits: Sequence[Edit]) -> BranchState:
        """Begin a branch whose first own step is `step`, under an edited mask.

        Raises `UsageError` for a step that there is not, `MaskError` for what cannot be edited.
        """
        line = self._find_branch(branch, step)
        parent = line.owner(step)
        said = [maskedits.with_segment_labels(edit, self._segments) for edit in edits]
        rule, changed = self._apply_edits(parent.source, said, step)
        source = self._make_source(rule, " + ".join([parent.source.name, *map(str, said)]))
        recomputed = changed > 0 or parent.recomputed_at(step)
        self._restore_before(parent, step, recomputed=recomputed)
        new = self._new_branch(parent, step, source)
        new.recomputed = recomputed
        about = {"rule": source.name, "recomputed": new.recomputed, "changed_rows": changed}
        meant = {"declared": declared_mask(source)}
        return self._begin_branch(
            new, {"kind": "mask", "edits": [*map(str, said)], **about, **meant}
        )

    def edit_cost(self, branch: int, step: int, edits: Sequence[Edit]) -> tuple[RestoreCost, int]:
        """Return what an edit costs until its first own step is over, and how many rows change.

        Those are rows computed already. Raises as `edit` does.
        """
        line = self._find_branch(branch, step)
        owner = line.owner(step)
        said = [maskedits.with_segment_labels(edit, self._segments) for edit in edits]
        changed = self._apply_edits(owner.source, said, step)[1]
        recomputed = changed > 0 or owner.recomputed_at(step)
        return self._branch_cost(line, step, recomputed=recomputed), changed

    def _apply_edits(
        self, source: MaskSource, edits: Sequence[Edit], step: int
    ) -> tuple[PatchedMask, int]:
        """Return the edited rule, and how many rows it changes that are computed already.

        Those are the rows of earlier steps; of step 0, which feeds the prompt, its own.
        """
        before = editable_mask(source, self._device)
        after = maskedits.apply_edits(edits, before, self._segments)
        n_prompt = len(self._decoder.prompt.ids)
        n_before = n_prompt + step - 1 if step else n_prompt
        return after, len(maskedits.changed_rows(before, after, n_before))

    def _make_source(self, rule: PatchedMask, name: str) -> MaskSource:
        length, compiled = self._segments[-1].stop, self.patch.compiled
        return make_mask_source(
            rule, name=name, length=length, device=self._device, compiled=compiled
        )

    def _branch_cost(self, branch: BranchState, step: int, *, recomputed: bool) -> RestoreCost:
        """Return what going before a step costs, and the forward of that step."""
        if recomputed or not step:
            return recompute_cost(branch, step, self._cache_sizes())
        before, own = self.restore_cost(branch.number, step - 1), branch.checkpoint(step).wall_ms
        n_rows, n_forwards = before.n_rows + 1, before.n_forwards + 1
        return replace(before, n_rows=n_rows, n_forwards=n_forwards, ms=before.ms + own)

    def _new_branch(self, parent: BranchState, step: int, source: MaskSource) -> BranchState:
        new = BranchState(len(self.branches), source, parent, step)
        self.branches.append(new)
        return new

    def _restore_before(self, parent: BranchState, step: int, *, recomputed: bool) -> None:
        """Stand before a step that a new line is to take over."""
        random = parent.checkpoint(step).rng_state
        if step and not recomputed:
            self._restore_step(parent, step - 1)
        else:  # its first forward feeds the whole sequence
            self._store_cache(self.current_branch)
            self._decoder.set_state(parent.token_ids(step), new_cache(self._model))
        self._decoder.sampler.restore(random)

    def _begin_branch(self, new: BranchState, change: Mapping[str, Any]) -> BranchState:
        """Record that a new line begins; it is the live one."""
        self.current_branch, new.change = new, change
        self._recorder.begin_branch(new)
        return new


def _recomputed_fact(recomputed: bool) -> dict[str, bool]:
    """Return what a change says of a first own step that fed the whole sequence."""
    return {"recomputed": True} if recomputed else {}


def _is_same_step(one: StepCheckpoint, other: StepCheckpoint) -> bool:
    return one.token_id == other.token_id and int(one.logits_checksum) == int(other.logits_checksum)


class BranchRecorder(Protocol):
    """Writes down what a journey does; `flexinspect_hooks.rewind.branch_recorder` has one for a trace."""

    def set_next_step(self, branch: int, step: int) -> None:
        """The next forward is this step."""

    def no_capture(self) -> AbstractContextManager[None]:
        """While entered, forwards are nobody's steps."""

    def drop_step(self, branch: BranchState) -> None:
        """The open step is in the trace already, as a step of `line`."""

    def on_token_chosen(self, branch: BranchState, choice: Choice) -> None:
        """The open step is over, and belongs to `line`."""

    def begin_branch(self, branch: BranchState) -> None:
        """A branch begins."""

    def end_branch(self, branch: BranchState, state: str, reason: str) -> None:
        """A branch, or the base, ended."""

    def record_event(
        self, kind: str, text: str, branch: BranchState, step: int, facts: Mapping[str, Any]
    ) -> None:
        """Something happened behind a step of a line."""


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When a generation ends."""

    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    should_stop: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """What going to a step costs: rows that are fed again, in how many forwards, and how long.

    `n_bytes` is what the caches will hold together; `ms` is estimated from the recorded steps.
    """

    n_rows: int
    n_forwards: int
    n_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """How a state was rebuilt. `why` tells of rows that came out differently: empty when exact."""

    cost: RestoreCost
    wall_ms: float
    message: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NearestCache:
    """A cache to begin from, cropped to the rows of the steps up to `step`; None: from nothing."""

    cache: Any
    step: int
    branch: int = 0


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What is fed: rows of the prompt, bytes of one row in a cache, bytes that caches hold now."""

    n_prompt: int
    row_bytes: int
    cache_bytes: int

    def bytes_with(self, step: int) -> int:
        """Return what caches hold together with one more that reaches up to a step."""
        return self.cache_bytes + self.row_bytes * (self.n_prompt + step)


def find_nearest_cache(
    branch: BranchState, step: int, caches: Sequence[tuple[BranchState, Any]], n_prompt: int
) -> NearestCache:
    """Return what is left of the rows of a step, as many as one cache has.

    `caches` are those that are alive, each with the line that fed it.
    """
    best = NearestCache(None, -1)
    for other, cache in caches:
        last = n_rows_of(cache) - n_prompt
        if last < 0 or other.cache_origin(last) is not branch.cache_origin(step):
            continue
        shared = branch.last_shared_step(other, min(step, last))
        is_better = shared > best.step and shared >= branch.cache_origin(step).fork_step
        if is_better and can_crop(cache, n_prompt + shared):
            best = NearestCache(crop_cache(cache, n_prompt + shared), shared, other.number)
    return best


def restore_cost(
    branch: BranchState, step: int, nearest: NearestCache, sizes: CacheSizes
) -> RestoreCost:
    """Return what it costs to stand behind a step, from the nearest cache on."""
    has_cache = nearest.cache is not None
    first = nearest.step + 1 if has_cache else branch.cache_origin(step).fork_step
    n_forwards = step + 1 - first
    n_rows = step - nearest.step if has_cache else sizes.n_prompt + step
    ms = sum(branch.checkpoint(number).wall_ms for number in range(first, step + 1))
    return RestoreCost(n_rows if n_forwards else 0, n_forwards, sizes.bytes_with(step), ms)


def recompute_cost(branch: BranchState, step: int, sizes: CacheSizes) -> RestoreCost:
    """Return what it costs to feed the whole sequence of a step anew, in one forward."""
    first, n_prompt = branch.cache_origin(step).fork_step, sizes.n_prompt
    ms = branch.checkpoint(first).wall_ms * (n_prompt + step) / (n_prompt + first)
    return RestoreCost(n_prompt + step, 1, sizes.bytes_with(step), ms)


def describe_branch(branch: BranchState) -> str:
    """Return what a branch begins with."""
    assert branch.parent is not None
    change = branch.change
    where = (
        f"Branch {branch.number} leaves branch {branch.parent.number} at step {branch.fork_step}"
    )
    if change.get("kind") == "replay":
        return f"{where}, as that step came out differently: {' '.join(change.get('why', ()))}"
    if change.get("kind") == "token":
        instead = change.get("instead_text")
        other = "" if instead is None else f" instead of {instead!r}"
        return f"{where}: it takes {change.get('text', change.get('token_id'))!r}{other}."
    rows = plural(int(change.get("changed_rows", 0)), "row")
    how = "no row computed before is touched, so only the cache is forked"
    if change.get("recomputed") and not change.get("changed_rows"):
        how = "no row computed before is touched, but all keys are computed again at that step"
    elif change.get("recomputed"):
        how = f"{rows} computed before changed, so all keys are computed again"
    elif not branch.fork_step:
        how = "its first step feeds the prompt"
    return f"{where} under an edited mask ({'; '.join(change.get('edits', ()))}): {how}."


def describe_restore(branch: BranchState, step: int, n_rows: int) -> str:
    """Return how a step was restored."""
    how = f"{plural(n_rows, 'row')} computed again" if n_rows else "its cache cropped"
    return f"Step {step} of branch {branch.number} was restored, {how}."
