"""One generation with branches: it decodes, restores steps, forks, and runs edited masks.

Restoring a step reuses what is still there: the cache of the branch, or of one that shares its
beginning, is cropped. Where that is not exact (sliding windows drop keys), or where no cache is
left, the forward passes of the recording are repeated with the same rows and masks, because only
those give the same bits. Steps that are in the trace are not recorded twice: decoding on from a
restored step is compared with the recording step by step. Where the result differs, a new branch
begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexinspect.control import messages
from flexinspect.core.errors import MaskError, UsageError
from flexinspect.core.text import plural
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.masks import edits as maskedits
from flexinspect.masks.edits import Edit, MaskPatch, PatchedMask
from flexinspect.masks.mask_presets import MaskSpec, spec_entries
from flexinspect_hooks.generation import mask_source
from flexinspect_hooks.generation.decoding import Decoder, StopCriteria, check_tokens, new_cache
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.loading.tokenizers import Vocabulary
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_identity
from flexinspect_hooks.rewind import branch_state
from flexinspect_hooks.rewind.branch_recorder import TraceBranchRecorder
from flexinspect_hooks.rewind.branch_state import BranchState, StepCheckpoint, checksum, n_rows_of


class RestoreCost(NamedTuple):
    """The cost of restoring a step: rows to compute again, in how many forward passes.

    `n_bytes` is the size of all caches afterwards; `ms` is estimated from the recorded steps.
    """

    n_rows: int
    n_forwards: int
    n_bytes: int
    ms: float


class RestoreResult(NamedTuple):
    """How a step was restored. `reasons` say why rows differ from the recording; () if exact."""

    cost: RestoreCost
    message: str
    reasons: tuple[str, ...]


class NearestCache(NamedTuple):
    """A cache cropped to the rows up to `step`; None if the whole sequence must be repeated."""

    cache: Any
    step: int
    branch: int = 0


class BranchingDecoder:
    """Drives one generation and its branches; the model's patch gets the mask of each branch."""

    def __init__(
        self,
        model: torch.nn.Module,
        decoder: Decoder,
        patch: FlexPatch,
        recorder: TraceBranchRecorder,
        criteria: StopCriteria,
    ) -> None:
        self._model, self._decoder, self.patch = model, decoder, patch
        self._recorder, self._criteria = recorder, criteria
        self._segments, self._n_prompt = decoder.prompt.segments, len(decoder.prompt.ids)
        self._cache_store = branch_state.CacheStore()
        self._conditions = branch_state.run_conditions(model)
        self._device = next(model.parameters()).device
        self.current_branch = BranchState(0, patch.source)
        self.branches = [self.current_branch]

    @property
    def step(self) -> int:
        """The last finished step, -1 before the first."""
        return self._decoder.step - 1

    @property
    def is_over(self) -> bool:
        """Whether the current branch has ended and the decoder is at its end."""
        is_at_end = self._decoder.step >= self.current_branch.n_steps
        return bool(self.current_branch.end_reason) and is_at_end

    def cache_bytes(self) -> int:
        """The bytes of all live caches."""
        return branch_state.cache_bytes([self._decoder.cache, *self._cache_store.values()])

    # -- decoding --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run one step of the current branch: record it, or compare it with its recording."""
        branch, step = self.current_branch, self._decoder.step
        self._recorder.set_next_step(branch.number, step)
        started = time.perf_counter()
        owner = branch.owner(step)
        self.patch.source = owner.source
        if owner.recomputed_at(step):
            self._decoder.set_state(self._decoder.token_ids, new_cache(self._model))
        logits = self._decoder.next_logits()
        rng_state = self._decoder.sampler.state()
        forced = next(iter(owner.forced[step - owner.fork_step :]), None)
        choice = self._decoder.choose(logits, forced)
        wall_ms = (time.perf_counter() - started) * 1e3
        checkpoint = StepCheckpoint(choice.token_id, rng_state, checksum(logits), wall_ms)
        if step < branch.n_steps:
            if self._is_as_recorded(branch, step, checkpoint):
                self._recorder.drop_step(owner.number)
                return
            branch = self.current_branch
        branch.checkpoints.append(checkpoint)
        self._recorder.on_token_chosen(branch, choice)
        branch.end_reason = self._criteria.reason(self._decoder.token_ids)
        if branch.end_reason:
            self._close_branch(branch, "finished", branch.end_reason)

    def _is_as_recorded(self, branch: BranchState, step: int, checkpoint: StepCheckpoint) -> bool:
        """Whether a repeated step equals its recording; otherwise begin a branch with it."""
        known = branch.checkpoint(step)
        is_same = int(known.logits_checksum) == int(checkpoint.logits_checksum)
        if is_same and known.token_id == checkpoint.token_id:
            return True
        why = self._difference_reasons()
        text = f"Step {step} differs from its recording. {' '.join(why)}"
        self._recorder.record_event("replay-differs", text, branch, step, {"why": why})
        parent = branch.owner(step)
        # The live cache now belongs to the new branch: its newest row is not the recorded one.
        change, forced = {"kind": "replay", "why": why}, parent.forced[step - parent.fork_step :]
        recomputed = parent.recomputed_at(step)
        self._begin_branch(parent, step, change, recomputed=recomputed, forced=forced)
        return False

    def _difference_reasons(self) -> list[str]:
        same = (
            "Weights, threads and modes are the same: an operation of the model is not "
            f"deterministic on {self._device.type}."
        )
        return branch_state.changed_conditions(
            self._conditions, branch_state.run_conditions(self._model)
        ) or [same]

    def close(self, state: str, reason: str) -> None:
        """End the current branch in `state` unless it has ended, and the others as interrupted."""
        for branch in self.branches:
            if branch.is_closed:
                continue
            if branch is self.current_branch:
                self._close_branch(branch, state, reason)
            else:
                self._close_branch(branch, "interrupted", f"left at step {branch.n_steps - 1}")
        self._cache_store.clear()

    def _close_branch(self, branch: BranchState, state: str, reason: str) -> None:
        branch.is_closed = True
        self._recorder.end_branch(branch, state, reason)

    # -- restoring -------------------------------------------------------------------------------

    def restore(self, branch: int, step: int) -> RestoreResult:
        """Return to the state after a recorded step. Raises `UsageError` for an unknown step."""
        state, started = self._find_branch(branch, step), time.perf_counter()
        cost = self.restore_cost(branch, step)
        reasons = self._restore_step(state, step)
        ms = round((time.perf_counter() - started) * 1e3, 3)
        how = f"{plural(cost.n_rows, 'row')} computed again" if cost.n_rows else "its cache cropped"
        message = " ".join([f"Step {step} of branch {branch} was restored, {how}.", *reasons])
        facts = {"rows": cost.n_rows, "forwards": cost.n_forwards, "ms": ms, "why": list(reasons)}
        self._recorder.record_event("restored", message, state, step, facts)
        return RestoreResult(cost, message, reasons)

    def restore_cost(self, branch: int, step: int) -> RestoreCost:
        """The cost of `restore` for a step. Raises `UsageError` for an unknown step."""
        state = self._find_branch(branch, step)
        nearest = self._nearest_cache(state, step)
        n_forwards = step - nearest.step
        n_rows = n_forwards if nearest.cache is not None else self._n_prompt + step
        ms = sum(state.checkpoint(number).wall_ms for number in range(nearest.step + 1, step + 1))
        return RestoreCost(n_rows, n_forwards, self._bytes_with(step), ms)

    def _bytes_with(self, step: int) -> int:
        """Bytes of all caches with one more that holds the rows up to a step."""
        row_bytes = branch_state.row_bytes(self._decoder.cache)
        return self.cache_bytes() + row_bytes * (self._n_prompt + step)

    def _nearest_cache(self, branch: BranchState, step: int) -> NearestCache:
        """The live cache that holds most of the rows of a step."""
        caches = [(self.current_branch.number, self._decoder.cache), *self._cache_store.items()]
        origin = branch.cache_origin(step)
        best = NearestCache(None, origin.fork_step - 1)
        for number, cache in caches:
            other, last = self.branches[number], n_rows_of(cache) - self._n_prompt
            if last < 0 or other.cache_origin(last) is not origin:
                continue
            shared = branch.last_shared_step(other, min(step, last))
            n_rows = self._n_prompt + shared
            if shared > best.step and branch_state.can_crop(cache, n_rows):
                best = NearestCache(branch_state.crop_cache(cache, n_rows), shared, number)
        return best

    def _find_branch(self, branch: int, step: int) -> BranchState:
        if not 0 <= branch < len(self.branches):
            raise UsageError(
                f"There is no branch {branch}; there are {len(self.branches)}, numbered from 0."
            )
        state = self.branches[branch]
        if not 0 <= step < state.n_steps:
            raise UsageError(
                f"Branch {branch} has no step {step}; its steps go from 0 to {state.n_steps - 1}."
            )
        return state

    def _restore_step(self, branch: BranchState, step: int) -> tuple[str, ...]:
        """Return to the state after a step; returns why rows differ, empty if none does."""
        nearest, decoder = self._nearest_cache(branch, step), self._decoder
        token_ids, cache, rng_state = decoder.token_ids, decoder.cache, decoder.sampler.state()
        if nearest.branch in self._cache_store:
            self._cache_store.move_to_end(nearest.branch)
        self._store_cache()
        reasons: tuple[str, ...] = ()
        try:
            if nearest.step == step:
                decoder.set_state(branch.token_ids(step + 1), nearest.cache)
            else:
                with self._recorder.no_capture():
                    reasons = self._replay(branch, step, nearest)
        except BaseException:  # a forward pass failed, or was interrupted
            decoder.set_state(token_ids, cache)
            decoder.sampler.restore(rng_state)
            raise
        decoder.sampler.restore(branch.rng_state_after(step))
        self.current_branch = branch
        return reasons

    def _store_cache(self) -> None:
        """Store the cache of the branch that is left, and its random state if at its end."""
        decoder, branch = self._decoder, self.current_branch
        if decoder.step == branch.n_steps and branch.checkpoints:
            branch.rng_state = decoder.sampler.state()
        if n_rows_of(decoder.cache):
            self._cache_store.put(branch.number, decoder.cache)

    def _replay(self, branch: BranchState, step: int, nearest: NearestCache) -> tuple[str, ...]:
        decoder, first = self._decoder, nearest.step + 1
        decoder.set_state(branch.token_ids(first), nearest.cache or new_cache(self._model))
        differing: list[int] = []
        for number in range(first, step + 1):
            self.patch.source = branch.owner(number).source
            checkpoint = branch.checkpoint(number)
            if int(checksum(decoder.next_logits())) != int(checkpoint.logits_checksum):
                differing.append(number)
            decoder.token_ids.append(checkpoint.token_id)
        if not differing:
            return ()
        return (f"Step {differing[0]} differs from its recording.", *self._difference_reasons())

    # -- forks and edited masks ------------------------------------------------------------------

    def fork(
        self,
        branch: int,
        step: int,
        token_ids: Sequence[int],
        text_of: Callable[[int], str] | None = None,
    ) -> BranchState:
        """Begin a branch that takes other tokens from a recorded step on, then decodes freely.

        With `text_of`, `BranchRecord.change` has the texts of the tokens. Raises `UsageError` for
        an unknown step, for the token that the step chose already, and for a token that the model
        does not have.
        """
        state = self._check_fork(branch, step, token_ids)
        parent, replaced = state.owner(step), state.checkpoint(step).token_id
        change = {"kind": "token", "token_id": token_ids[0], "instead_id": replaced}
        if len(token_ids) > 1:
            change["token_ids"] = list(token_ids)
        if text_of is not None:
            change["text"] = "".join(map(text_of, token_ids))
            change["instead_text"] = text_of(replaced)
        recomputed = parent.recomputed_at(step)
        self._restore_before(parent, step, recomputed=recomputed)
        forced = tuple(token_ids)
        return self._begin_branch(parent, step, change, recomputed=recomputed, forced=forced)

    def fork_cost(self, branch: int, step: int, token_ids: Sequence[int]) -> RestoreCost:
        """The cost of a fork up to the end of its first own step. Raises as `fork` does."""
        state = self._check_fork(branch, step, token_ids)
        return self._branch_cost(state, step, recomputed=state.owner(step).recomputed_at(step))

    def _check_fork(self, branch: int, step: int, token_ids: Sequence[int]) -> BranchState:
        state = self._find_branch(branch, step)
        if not token_ids:
            raise UsageError("A fork needs at least one token.")
        check_tokens(self._model, token_ids)
        if tuple(token_ids) == (state.checkpoint(step).token_id,):
            raise UsageError(f"Step {step} chose that token already; a fork needs another one.")
        return state

    def edit_mask(self, branch: int, step: int, edits: Sequence[Edit]) -> BranchState:
        """Begin a branch under an edited mask at `step`. Raises `UsageError` or `MaskError`."""
        parent = self._find_branch(branch, step).owner(step)
        labels, mask, n_changed = self._apply_edits(parent.source, edits, step)
        name, length = " + ".join([parent.source.name, *labels]), self._segments[-1].stop
        source = make_mask_source(
            mask, name=name, length=length, device=self._device, compiled=self.patch.compiled
        )
        recomputed = n_changed > 0 or parent.recomputed_at(step)
        self._restore_before(parent, step, recomputed=recomputed)
        change = {
            "kind": "mask",
            "edits": labels,
            "mask_mod": source.name,
            "recomputed": recomputed,
            "changed_rows": n_changed,
            "declared": declared_mask(source),
        }
        return self._begin_branch(parent, step, change, recomputed=recomputed, source=source)

    def edit_cost(self, branch: int, step: int, edits: Sequence[Edit]) -> tuple[RestoreCost, int]:
        """Return the cost of an edit and its first own step, and how many rows it changes.

        Raises as `edit_mask` does.
        """
        state = self._find_branch(branch, step)
        owner = state.owner(step)
        n_changed = self._apply_edits(owner.source, edits, step)[2]
        recomputed = n_changed > 0 or owner.recomputed_at(step)
        return self._branch_cost(state, step, recomputed=recomputed), n_changed

    def _apply_edits(
        self, source: mask_source.MaskSource, edits: Sequence[Edit], step: int
    ) -> tuple[list[str], PatchedMask, int]:
        """The edits by segment label, the edited mask, and how many computed rows it changes."""
        labelled = [maskedits.with_segment_labels(edit, self._segments) for edit in edits]
        before = editable_mask(source)
        after = maskedits.apply_edits(labelled, before, self._segments)
        n_computed = self._n_prompt + max(step - 1, 0)  # step 0 computes the prompt itself
        n_changed = len(maskedits.changed_rows(before, after, n_computed))
        return [str(edit) for edit in labelled], after, n_changed

    def _branch_cost(self, branch: BranchState, step: int, *, recomputed: bool) -> RestoreCost:
        """The cost of returning to the state before a step, and of the step itself."""
        if recomputed or not step:  # the whole sequence in one forward pass
            first, n_rows = branch.cache_origin(step).fork_step, self._n_prompt + step
            ms = branch.checkpoint(first).wall_ms * n_rows / (self._n_prompt + first)
            return RestoreCost(n_rows, 1, self._bytes_with(step), ms)
        n_rows, n_forwards, n_bytes, ms = self.restore_cost(branch.number, step - 1)
        own_ms = branch.checkpoint(step).wall_ms
        return RestoreCost(n_rows + 1, n_forwards + 1, n_bytes, ms + own_ms)

    def _restore_before(self, parent: BranchState, step: int, *, recomputed: bool) -> None:
        """Return to the state before a step, which will be the first of a new branch."""
        rng_state = parent.checkpoint(step).rng_state
        if step and not recomputed:
            self._restore_step(parent, step - 1)
        else:  # its first forward pass processes the whole sequence
            self._store_cache()
            self._decoder.set_state(parent.token_ids(step), new_cache(self._model))
        self._decoder.sampler.restore(rng_state)

    def _begin_branch(
        self,
        parent: BranchState,
        step: int,
        change: Mapping[str, Any],
        *,
        recomputed: bool,
        forced: tuple[int, ...] = (),
        source: mask_source.MaskSource | None = None,
    ) -> BranchState:
        """Record that a new branch begins, by default under its parent's mask, and switch to it."""
        change = {**change, "recomputed": True} if recomputed else change
        source, number = source or parent.source, len(self.branches)
        new = BranchState(number, source, parent, step, forced, recomputed, change)
        self.branches.append(new)
        self.current_branch = new
        self._recorder.begin_branch(new)
        return new


# -- edited masks ----------------------------------------------------------------------------------


def editable_mask(source: mask_source.MaskSource) -> PatchedMask:
    """The mask of a source, in the form that edits apply to; head 0 represents all heads."""
    if isinstance(source, EditedMask):
        return source.edited
    assert isinstance(source, mask_source.SpecMaskSource | mask_source.UserMaskSource)
    return PatchedMask(source.spec if isinstance(source, mask_source.SpecMaskSource) else source)


def make_mask_source(
    edited: PatchedMask, *, name: str, length: int, device: torch.device, compiled: bool
) -> mask_source.MaskSource:
    """The source that runs an edited mask over sequences of at most `length` tokens."""
    base = edited.base
    if isinstance(base, MaskSpec):
        source = mask_source.SpecMaskSource(base, length=length, device=device, compiled=compiled)
        if not edited.patches:
            return source
        base_mask_mod = source.mask_mod(mask_source.ForwardWindow(length, length, 0))
        identity = str(base)
    else:
        assert isinstance(base, mask_source.UserMaskSource)
        base_mask_mod = base.mask_mod
        identity = f"{base.name}{mask_mod_identity(base_mask_mod)}"
    mask_mod = _patch_mask_mod(base_mask_mod, edited.patches)
    mask_source.set_identity(mask_mod, f"{identity}{edited.patches}")
    result = EditedMask(mask_mod, name=name, device=device)
    result.edited = edited
    return result


def declared_mask(source: mask_source.MaskSource) -> dict[str, Any]:
    """The entries of `GenerationRecord.declared` for the mask of a source."""
    if isinstance(source, mask_source.SpecMaskSource):
        return spec_entries(source.spec)
    return {"mask_mod": source.name}


class EditedMask(mask_source.UserMaskSource):
    """Runs a mask_mod with patches on top, in the same way as the user's own mask_mod."""

    edited: PatchedMask


def _patch_mask_mod(base: mask_source.MaskMod, patches: Sequence[MaskPatch]) -> mask_source.MaskMod:
    """A mask_mod with patches on top, in positions: comparisons only, no look-ups."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_open = base(b, h, q_idx, kv_idx)
        for patch in patches:
            inside = (q_idx >= patch.row_start) & (q_idx < patch.row_stop)
            inside = inside & (kv_idx >= patch.key_start) & (kv_idx < patch.key_stop)
            is_open = is_open | (inside & (kv_idx <= q_idx)) if patch.is_open else is_open & ~inside
        return is_open

    return mask_mod


# -- rewind commands -------------------------------------------------------------------------------

CONFIRM_ABOVE_S = 1.0
"""A command that is estimated to take longer than this needs a confirmation."""


class RewindHandler:
    """Estimates and executes rewind commands; `decoder` is None while no generation is running."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.generation = 0
        self.decoder: BranchingDecoder | None = None

    def estimate_cost(self, command: messages.RewindCommand) -> messages.Cost:
        """Estimate a command's cost, from any thread. Raises `FlexInspectError` if impossible."""
        (decoder, place), prefix = self._decoder_and_place(command), ""
        if isinstance(command, messages.Restore):
            cost = decoder.restore_cost(*place)
        elif isinstance(command, messages.Fork):
            cost = decoder.fork_cost(*place, self._fork_tokens(command))
        else:
            cost, n_changed = decoder.edit_cost(*place, _mask_edits(command))
            rows = f"{plural(n_changed, 'computed row')} changed"
            prefix = f"{rows if n_changed else 'No computed row changes'}: "
        seconds, size = cost.ms / 1e3, human_bytes(cost.n_bytes)
        how = "the cache is cropped"
        if cost.n_forwards:
            rows, forwards = plural(cost.n_rows, "row"), plural(cost.n_forwards, "forward")
            how = f"about {seconds:.1f} s ({rows} in {forwards})"
        sentence = f"{prefix}{how}; the caches will hold {size}."
        return messages.Cost(sentence, round(seconds, 4), cost.n_bytes, seconds > CONFIRM_ABOVE_S)

    def execute(self, command: messages.RewindCommand) -> tuple[messages.StepRef, str]:
        """Execute a command; return the step the model is at, and a sentence about the result.

        Raises `FlexInspectError` if it cannot be executed; the model then stays where it was.
        """
        decoder, place = self._decoder_and_place(command)
        if isinstance(command, messages.Restore):
            message = decoder.restore(*place).message
        elif isinstance(command, messages.Fork):
            token_ids = self._fork_tokens(command)
            message = decoder.fork(*place, token_ids, self._vocabulary.text_of).describe()
        else:
            message = decoder.edit_mask(*place, _mask_edits(command)).describe()
        current = decoder.current_branch.number
        return messages.StepRef(self.generation, current, decoder.step), message

    def _fork_tokens(self, command: messages.Fork) -> list[int]:
        if command.token_id is not None:
            return [command.token_id]
        token_ids = list(self._vocabulary.encode(command.text or ""))
        if not token_ids:
            raise UsageError("A fork needs a token or a text of at least one token.")
        return token_ids

    def _decoder_and_place(
        self, command: messages.RewindCommand
    ) -> tuple[BranchingDecoder, tuple[int, int]]:
        """Return the decoder, and the branch and step that a command names."""
        place = command.place
        if self.decoder is None:
            raise UsageError("No generation is running, so there is nothing to rewind.")
        if place.generation != self.generation:
            raise UsageError(
                f"Generation {place.generation} is not running any more; the running generation is "
                f"{self.generation}.",
                hint="Only a generation that is running, or is held at its end, can be rewound.",
            )
        return self.decoder, (place.branch, place.step)


def _mask_edits(request: messages.EditMask) -> list[Edit]:
    if not request.edits:
        raise MaskError("Editing the mask needs at least one edit.")
    return [edit for message in request.edits for edit in parse_mask_edit(message)]


def parse_mask_edit(message: messages.MaskEdit) -> list[Edit]:
    """The edits that a message describes. Raises `MaskError` if it lacks segments, row or key."""
    op = message.op
    names = tuple(map(str, message.segments))
    needed = {"join": 2, "see": 2, "drop": 1}.get(op, 0)
    if len(names) < needed or (op == "see" and len(names) != 2):
        raise MaskError(f"'{op}' needs {plural(needed, 'segment')}.")
    match op:
        case "preset":
            return [Edit("preset", (message.name,))]
        case "drop":
            return [Edit("drop", (name,)) for name in names]
        case "join":
            return [Edit("join", pair) for pair in combinations(names, 2)]
        case "see":
            return [Edit("see", names, (), None if message.is_open else False)]
    wanted = (message.row,) if op == "row" else (message.row, message.key)
    positions = tuple(position for position in wanted if position is not None)
    if len(positions) < len(wanted):
        raise MaskError(f"'{op}' needs {'a row' if op == 'row' else 'a row and a key'}.")
    return [Edit(op, (), positions, message.is_open)]
