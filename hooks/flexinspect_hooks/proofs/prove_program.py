"""Proofs of the user's own program: it runs until a call of a model, which is then proved.

The proof is made at that call, because the program may remove its patches afterwards: the model
runs again with other ids while all patches are in place. The program ends after the proof.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.records.job import ScriptJob
from flexinspect_hooks.proofs import options_of, prove
from flexinspect_hooks.proofs.proof_subject import RunIds
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.user_code.program import TokenizerTracker, run_program

_NOT_JUDGED = (
    "These steps are those of a greedy loop of flexinspect with the program's model; the program's "
    "own loop was not judged: flexinspect audit compares its steps."
)
"""What a proof of the cache says at a plain forward, after which it decodes by itself."""


class _ProofMadeError(BaseException):
    """Ends the program after the proof; `except Exception` does not catch it."""


class _RepeatableCall(Struct, frozen=True):
    """A call of a model that can be repeated with other ids."""

    model: nn.Module
    ids: Tensor
    run: RunIds
    attention_mask: Tensor | None
    generates: bool


def prove_script(kind: str, job: ScriptJob, *, call: int, every: int) -> Proof:
    """Run a program up to its `call`-th call of a model with a whole prompt, and prove that call.

    Raises `UsageError` if the program ends before that call, or if it cannot be proved, and any
    exception that the program raises before it.
    """
    watch = _CallWatcher(kind, job, call, every)
    with watch.installed(), suppress(_ProofMadeError, SystemExit):
        run_program(job.program, job.args, is_module=job.is_module)
    if isinstance(watch.result, FlexInspectError):
        raise watch.result
    if watch.result is None:
        calls = "call" if watch.n_calls == 1 else "calls"
        raise UsageError(
            f"{job.program} made {watch.n_calls} suitable {calls} of a transformers model, so call "
            f"{call} could not be proved.",
            hint="A suitable call runs a whole prompt, at least as long as the declared segments, "
            "with an empty cache. --call N chooses another one.",
        )
    return watch.result


class _CallWatcher:
    """Intercepts the outermost calls of transformers models, and proves one of them."""

    def __init__(self, kind: str, job: ScriptJob, call: int, every: int) -> None:
        self._kind, self._job, self._call, self._every = kind, job, call, every
        self._tokenizers = TokenizerTracker()
        self._is_inside = False
        self.n_calls = 0
        self.result: Proof | FlexInspectError | None = None

    @contextmanager
    def installed(self) -> Any:
        """Intercept every outermost call of a model inside the context."""
        import transformers.tokenization_utils_base  # noqa: F401
        from transformers.generation.utils import GenerationMixin
        from transformers.modeling_utils import PreTrainedModel

        call = self._wrap(nn.Module.__call__, generates=False)
        generate = self._wrap(GenerationMixin.generate, generates=True)
        with ExitStack() as stack:
            self._tokenizers.watch()
            stack.callback(self._tokenizers.end)
            stack.callback(patch(PreTrainedModel, "__call__", call))
            stack.callback(patch(GenerationMixin, "generate", generate))
            yield

    def _wrap(self, original: Callable[..., Any], *, generates: bool) -> Any:
        def called(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or torch.compiler.is_compiling():
                return original(model, *args, **kwargs)
            self._is_inside = True
            try:
                call = _repeatable_call(model, original, args, kwargs, generates=generates)
                if call is not None and self._is_target(call):
                    self._prove(call)
                return original(model, *args, **kwargs)
            finally:
                self._is_inside = False

        return called

    def _is_target(self, call: _RepeatableCall) -> bool:
        """Count the call if it has as many rows as were declared; returns whether to prove it."""
        spans = [one[1] for one in self._job.declaration.segments if len(one) == 3]
        if any(isinstance(stop, int) and stop > call.ids.shape[1] for stop in spans):
            return False
        self.n_calls += 1
        return self.n_calls == self._call

    def _prove(self, call: _RepeatableCall) -> None:
        """Make the proof and end the program."""
        program = self._job.program
        try:
            proof = prove(self._kind, call.model, call.ids, **self._options(call))
            listed = ",".join(map(str, call.ids[0].tolist())).encode()
            prompt_hash = hashlib.blake2b(listed, digest_size=8).hexdigest()
            facts = {**proof.facts, "program": program, "prompt_hash": prompt_hash}
            if self._kind == "cache" and not call.generates:
                proof = _limit_to_own_loop(proof)
                facts["judged"] = "a greedy loop of flexinspect"
            head = f"{program}, call {self._call} of {type(call.model).__name__}"
            self.result = replace(proof, lines=(head, *proof.lines), facts=facts)
        except FlexInspectError as error:
            self.result = error
        raise _ProofMadeError

    def _options(self, call: _RepeatableCall) -> dict[str, Any]:
        """The declared options that this kind of proof accepts."""
        declaration = self._job.declaration
        options: dict[str, Any] = {
            "segments": list(declaration.segments) or None,
            "mask": declaration.mask,
            "run": call.run,
            "attention_mask": call.attention_mask,
            "tokenizer": next(iter(self._tokenizers.live_tokenizers()), None),
            "every": self._every,
        }
        if self._kind == "cache" and not call.generates:
            del options["run"]  # one forward pass has no decode steps: generate greedily instead
        of_subject, of_check = options_of(self._kind)
        return {name: options[name] for name in (*of_subject, *of_check) if name in options}


def _limit_to_own_loop(proof: Proof) -> Proof:
    """Say in a proof and in its findings that the program's own steps were not judged."""
    findings = tuple(
        replace(one, sentence=f"{one.sentence} {_NOT_JUDGED}") for one in proof.findings
    )
    return replace(proof, lines=(*proof.lines, _NOT_JUDGED), findings=findings)


def _repeatable_call(
    model: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    generates: bool,
) -> _RepeatableCall | None:
    """The call if it runs a prompt with an empty cache, None for any other."""
    name = next((one for one in ("input_ids", "inputs") if one in kwargs), None)
    ids = kwargs[name] if name is not None else args[0] if args else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 2 or ids.is_floating_point():
        return None
    cache = kwargs.get("past_key_values")
    if cache is not None and _cache_length(cache) != 0:
        return None

    def run(other_ids: Tensor) -> None:
        arguments = dict(kwargs)
        if name is not None:
            arguments[name] = other_ids
        if cache is not None:
            arguments["past_key_values"] = copy.deepcopy(cache)
        positional = args if name is not None else (other_ids, *args[1:])
        original(model, *positional, **arguments)

    mask = kwargs.get("attention_mask")
    is_padding = isinstance(mask, Tensor) and mask.shape == ids.shape
    return _RepeatableCall(
        model, ids.detach().clone(), run, mask if is_padding else None, generates
    )


def _cache_length(cache: Any) -> int:
    try:
        return int(cache.get_seq_length())
    except Exception:  # a cache of an unknown kind may hold anything
        return -1
