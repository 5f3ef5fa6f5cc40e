"""Finds the operation that made the first NaN or Inf, by running the sick step again with checks.

The findings of a run say in which layer's output NaN shows first. At the end of the program the
committed text up to that step runs once more through the model itself, or through the audit's
reference if the program has deleted the model, and every operation of torch is checked. Nothing is
reported unless the NaN appears again, in the same layer or before it.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePath
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore, StepEvidence
from flexinspect_hooks.audit.forward.unrecorded import unrecorded
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel
from flexinspect_hooks.capture.failure_facts import is_library_file
from flexinspect_hooks.capture.recorder import Recorder

FINDINGS = ("numbers.nan", "numbers.inf")
_MAX_TOKENS, _MAX_FINDINGS = 4096, 3
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class Origin(Struct):
    """The operation that made the first non-finite value of a forward.

    `operation` is torch's name, `module` that of the innermost module with its class. `parameter`
    names the parameter that was not finite itself. `rows` are positions (batch row, token) of its
    output, empty if the output has no rows. `line` is the line of the program that called it.
    """

    operation: str
    value: str
    module: str = ""
    cls: str = ""
    parameter: str = ""
    rows: tuple[tuple[int, int], ...] = ()
    line: str = ""
    is_empty_row: bool = False

    @property
    def layer(self) -> int | None:
        """The layer of the module, None outside of all layers."""
        found = _LAYER.search(self.module)
        return None if found is None else int(found[1])


class FirstNonFinite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes the first operation that makes NaN or +Inf from finite tensors.

    -Inf is how masks close cells, so it counts as finite.
    """

    def __init__(self, model: nn.Module, n_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origin: Origin | None = None
        self._n_tokens, self._modules = n_tokens, list[tuple[str, str]]()
        self._names = {one.data_ptr(): name for name, one in model.named_parameters()}
        self._names |= {one.data_ptr(): name for name, one in model.named_buffers()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.origin is None:
            for tensor in _tensors((output,)):
                if (bad := _non_finite(tensor)) is not None:
                    self.origin = self._describe(func, args, tensor, bad)
                    break
        return output

    def _describe(self, func: Any, args: Any, output: Tensor, bad: Tensor) -> Origin | None:
        inputs = list(_tensors(args))
        sick = [one for one in inputs if _non_finite(one) is not None]
        known = [self._names.get(one.data_ptr(), "") for one in sick]
        module, cls = self._modules[-1] if self._modules else ("", "")
        return Origin(
            str(func.overloadpacket).rpartition(".")[2].lstrip("_"),
            "NaN" if bool(torch.isnan(output).any()) else "Inf",
            module,
            cls,
            next((name for name in known if name), ""),
            _rows(bad, self._n_tokens),
            _program_line(),
            is_empty_row=any(bool(_has_closed_row(one)) for one in inputs),
        )

    @contextmanager
    def watch_modules(self, model: nn.Module) -> Iterator[None]:
        """Know which module runs."""
        removes: list[Callable[[], None]] = []
        for name, module in model.named_modules():
            entry = name, type(module).__name__
            enter = module.register_forward_pre_hook(lambda *_, e=entry: self._modules.append(e))
            leave = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            removes += [enter.remove, leave.remove]
        try:
            yield
        finally:
            for remove in removes:
                remove()

    def _leave(self) -> None:
        if self._modules:
            self._modules.pop()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _non_finite(tensor: Tensor) -> Tensor | None:
    """Return where a tensor is NaN or +Inf, None if nowhere."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    bad = torch.isnan(tensor) | (tensor == torch.inf)
    return bad if bool(bad.any()) else None


def _has_closed_row(tensor: Tensor) -> bool:
    is_scores = tensor.is_floating_point() and tensor.dim() >= 2 and tensor.shape[-1] > 1
    return is_scores and bool((tensor == -torch.inf).all(-1).any())


def _rows(bad: Tensor, n_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return (batch row, token) of a mask (batch, tokens, …) or (batch, heads, tokens, …)."""
    dims = [dim for dim in (1, 2) if bad.dim() > dim + 1 and bad.shape[dim] == n_tokens]
    if not dims and bad.dim() == 2 and bad.shape[0] % n_tokens == 0:  # batch and tokens as one
        bad = bad.view(-1, n_tokens, bad.shape[-1])
        dims = [1]
    if not dims:
        return ()
    dim = dims[0] if bad.dim() == 3 else dims[-1]
    others = [one for one in range(bad.dim()) if one not in (0, dim)]
    found = bad.any(dim=others) if others else bad
    return tuple((int(batch), int(row)) for batch, row in found.nonzero().tolist())


def _program_line() -> str:
    """Return the line of the program that called the operation, as `f (a.py:3: "x / y")`."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and frame.f_code.co_filename != __file__:
        file = frame.f_code.co_filename
        if not is_library_file(file):
            text = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            where = f"{PurePath(file).name}:{frame.f_lineno}"
            return f'{frame.f_code.co_qualname} ({where}: "{text[:60]}")'
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# -- the findings of a run -------------------------------------------------------------------------


def explain_nonfinite(store: EvidenceStore, recorder: Recorder) -> list[Origin]:
    """Name the operation in each finding of NaN or Inf of these steps; return what was found."""
    if recorder.path is None:
        return []
    origins: list[Origin] = []
    with open_trace(recorder.path) as reader:
        findings = [one for one in reader.findings() if one.id in FINDINGS and one.step is not None]
        findings = [one for one in findings if one.generation in store.steps]
        for finding in findings[:_MAX_FINDINGS]:
            origin = _find(store, finding)
            if origin is not None:
                origins.append(origin)
                recorder.explain_finding(_with_origin(finding, origin, reader))
    return origins


def _find(store: EvidenceStore, finding: Finding) -> Origin | None:
    steps = [one for one in store.steps[finding.generation] if one.step <= (finding.step or 0)]
    inputs = _inputs(steps)
    if inputs is None or steps[-1].step != finding.step:
        return None
    for model in _models(store, finding.generation):
        with suppress(Exception):  # a program's own code may run only in the state that it had
            origin = _first_of(model, *inputs)
            if origin is None:
                continue
            layer = origin.layer if origin.layer is not None else -1
            if finding.layer is None or layer <= finding.layer:
                return origin
    return None


def _models(store: EvidenceStore, generation: int) -> Iterator[nn.Module]:
    """Yield the model of the program if it is alive, and the reference."""
    model = store.weights.find_model()
    if model is not None:
        yield model
    with suppress(Exception):
        source = store.weights.of(generation)
        yield ReferenceModel(source, source.parameters[0].dtype).model


def _inputs(steps: Sequence[StepEvidence]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return the tokens of some steps in one table, and their masks; None if some are missing."""
    n = 0
    for step in steps:
        if step.kv_before != n or step.ids is None:
            return None
        n += step.q_len
    if not steps or n > _MAX_TOKENS or any(step.has_dense_mask for step in steps):
        return None
    ids = torch.cat([step.ids for step in steps if step.ids is not None], 1)
    mask, arguments = steps[0].padding, dict[str, Tensor]()
    if mask is not None:
        more = mask.new_ones(mask.shape[0], n - mask.shape[1])
        arguments["attention_mask"] = torch.cat((mask, more), 1)
    positions = [step.positions for step in steps]
    if all(one is not None for one in positions):
        arguments["position_ids"] = torch.cat([one for one in positions if one is not None], 1)
    return ids, arguments


def _first_of(model: nn.Module, ids: Tensor, arguments: dict[str, Tensor]) -> Origin | None:
    checks = FirstNonFinite(model, int(ids.shape[1]))
    with unrecorded(), torch.no_grad(), checks.watch_modules(model), checks:
        model(input_ids=ids, use_cache=False, **arguments)
    return checks.origin


def _with_origin(finding: Finding, origin: Origin, reader: TraceReader) -> Finding:
    """Return a finding whose sentence begins with the operation."""
    generation, step = finding.generation, finding.step or 0
    tokens = {token.pos: token for token in reader.tokens(generation, stop=1 << 40)}
    where = (
        f"{printable(origin.module)} ({printable(origin.cls)})" if origin.module else "the model"
    )
    by = f"`{origin.operation}` in {where}"
    if origin.line:
        by += f", at {printable(origin.line)}"
    if origin.parameter:
        what = f"{origin.value} comes from the parameter {printable(origin.parameter)}, by {by}"
    elif origin.is_empty_row and "softmax" in origin.operation:
        what = f"{origin.value} is made by {by}: the softmax of a row without an open key"
    else:
        what = f"{origin.value} is made by {by}, from finite values"
    if origin.rows:
        batch, pos = origin.rows[0]
        token = tokens.get(pos)
        text = f' "{printable(token.text or token.token)}"' if token is not None else ""
        of_batch = f" of batch row {batch}" if batch else ""
        what += f", in {plural(len(origin.rows), 'row')} (first: position {pos}{text}{of_batch})"
    facts = {name: getattr(origin, name) for name in ("operation", "module", "parameter", "line")}
    evidence = {**finding.evidence, "origin": {**facts, "rows": len(origin.rows), "step": step}}
    return replace(finding, sentence=f"{what}. {finding.sentence}", evidence=evidence)
