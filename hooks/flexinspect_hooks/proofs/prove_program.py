"""Proofs of a user's own program: it runs, and at a call of a model the proof is made, right there.

There, because what a program patches it may take back after the call: the model is run again while
everything is as the program has it, with other ids in place of those that it feeds. The program
ends when the proof is made.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.records.job import ScriptJob
from flexinspect_hooks.proofs import prove, prover_of
from flexinspect_hooks.proofs.proof_subject import OnProgress
from flexinspect_hooks.user_code.program import run_program
from flexinspect_hooks.user_code.tokenizer_tracking import TokenizerTracker

_RunIds = Callable[[Tensor], Any]


class _ProofMadeError(BaseException):
    """Unwinds the program once the proof is made; nothing that catches exceptions catches it."""


@dataclass(frozen=True, slots=True)
class _RepeatableCall:
    """A call of a model that can be made again with other ids."""

    model: nn.Module
    ids: Tensor
    run: _RunIds
    attention_mask: Tensor | None
    generates: bool


def prove_script(
    kind: str, job: ScriptJob, *, call: int, every: int, report: OnProgress | None = None
) -> Proof:
    """Run a program up to its `call`-th call of a model with a whole prompt, and prove that call.

    Raises `UsageError` when the program ends before, or what is asked cannot be proved, and
    whatever the program raises before that call.
    """
    watch = _CallWatcher(kind, job, call, every, report)
    with watch.installed(), suppress(_ProofMadeError, SystemExit):
        run_program(job.program, job.args, is_module=job.is_module)
    if watch.error is not None:
        raise watch.error
    if watch.proof is None:
        raise UsageError(
            f"{job.program} made {watch.n_calls} calls of a transformers model that fit, and call "
            f"{call} was to be proved.",
            hint="A call fits that feeds a whole prompt, as long as the declared segments, to an "
            "empty cache. --call N names another one.",
        )
    return watch.proof


class _CallWatcher:
    """Watches the outermost calls of transformers models, and proves one of them."""

    def __init__(
        self, kind: str, job: ScriptJob, call: int, every: int, report: OnProgress | None
    ) -> None:
        self._kind, self._job, self._call, self._every = kind, job, call, every
        self._report = report
        self._tokenizers = TokenizerTracker()
        self._is_inside = False
        self.n_calls = 0
        self.proof: Proof | None = None
        self.error: FlexInspectError | None = None

    @contextmanager
    def installed(self) -> Any:
        """While entered, every outermost call of a model is looked at."""
        import transformers.tokenization_utils_base  # noqa: F401
        from transformers.generation.utils import GenerationMixin
        from transformers.modeling_utils import PreTrainedModel

        generate = GenerationMixin.generate
        self._tokenizers.watch()
        PreTrainedModel.__call__ = self._wrap(nn.Module.__call__, generates=False)
        GenerationMixin.generate = self._wrap(generate, generates=True)
        try:
            yield
        finally:
            del PreTrainedModel.__call__
            GenerationMixin.generate = generate
            self._tokenizers.end()

    def _wrap(self, original: Callable[..., Any], *, generates: bool) -> Any:
        def called(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or torch.compiler.is_compiling():
                return original(model, *args, **kwargs)
            self._is_inside = True
            try:
                fed = _repeatable_call(model, original, args, kwargs, generates=generates)
                if fed is not None and self._is_target(fed):
                    self._prove(fed)
                return original(model, *args, **kwargs)
            finally:
                self._is_inside = False

        return called

    def _is_target(self, call: _RepeatableCall) -> bool:
        """Count a call that feeds as many rows as were declared; say whether it is the one."""
        spans = [one[1] for one in self._job.declaration.segments if len(one) == 3]
        if any(isinstance(stop, int) and stop > call.ids.shape[1] for stop in spans):
            return False
        self.n_calls += 1
        return self.n_calls == self._call

    def _prove(self, call: _RepeatableCall) -> None:
        """Make the proof and end the program."""
        options = self._options(call)
        try:
            proof = prove(self._kind, call.model, call.ids, **options)
        except FlexInspectError as error:
            self.error = error
            raise _ProofMadeError from None
        about = f"{self._job.program}, call {self._call} of {type(call.model).__name__}"
        self.proof = replace(
            proof,
            lines=(about, *proof.lines),
            facts={**proof.facts, "program": self._job.program, "fed": ids_digest(call.ids)},
        )
        raise _ProofMadeError

    def _options(self, call: _RepeatableCall) -> dict[str, Any]:
        """Return what was declared, in the keywords of this kind of proof."""
        said = self._job.declaration
        every: dict[str, Any] = {
            "segments": list(said.segments) or None,
            "mask": said.mask,
            "run": call.run,
            "attention_mask": call.attention_mask,
            "tokenizer": next(iter(self._tokenizers.live_tokenizers()), None),
            "every": self._every,
            "report": self._report,
        }
        if self._kind == "cache" and not call.generates:
            del every["run"]  # one forward makes no step after the prompt: ours are chosen greedily
        known = inspect.signature(prover_of(self._kind)).parameters
        return {name: value for name, value in every.items() if name in known}


def ids_digest(ids: Tensor) -> str:
    """Return what tells the ids of batch row 0 from others."""
    listed = ",".join(str(int(one)) for one in ids[0])
    return hashlib.blake2b(listed.encode(), digest_size=8).hexdigest()


def _repeatable_call(
    model: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    generates: bool,
) -> _RepeatableCall | None:
    """Return a call that feeds a prompt to an empty cache, None for any other."""
    name = next((one for one in ("input_ids", "inputs") if one in kwargs), None)
    ids = kwargs[name] if name is not None else args[0] if args else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 2 or ids.is_floating_point():
        return None
    cache = kwargs.get("past_key_values")
    if cache is not None and _cache_length(cache) != 0:
        return None

    def run(other: Tensor) -> None:
        given = dict(kwargs)
        if name is not None:
            given[name] = other
        if cache is not None:
            given["past_key_values"] = copy.deepcopy(cache)
        rest = args if name is not None else (other, *args[1:])
        original(model, *rest, **given)

    mask = kwargs.get("attention_mask")
    is_padding = isinstance(mask, Tensor) and mask.shape == ids.shape
    return _RepeatableCall(
        model, ids.detach().clone(), run, mask if is_padding else None, generates
    )


def _cache_length(cache: Any) -> int:
    try:
        return int(cache.get_seq_length())
    except Exception:  # of a kind that cannot be asked: it may hold anything
        return -1
