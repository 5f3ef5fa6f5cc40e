"""`flexinspect diff --bisect`: run B again with A's tensors, to find the module that differs.

B runs again up to one step. Its layers get A's recorded hidden states as inputs, so that each shows
only the difference that it makes itself; then A's output is put in at one layer after another,
until the difference of the logits is gone. Where A can be run again too, the modules within a layer
that makes a difference get the inputs that they have in A.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect.analysis.run_diff.bisection import (
    Bisection,
    BisectRequest,
    LayerResult,
    ModuleResult,
)
from flexinspect.analysis.run_diff.quantities import relative_difference
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.hub_download import OnLoadProgress
from flexinspect.inputs.job_samples import load_samples
from flexinspect.records.job import Job
from flexinspect.records.prompt import Prompt
from flexinspect.rules.step_diff import to_float32
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.capture.layer_rows import CapturePoint, capture_rows
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks
from flexinspect_hooks.ensemble import capture_process
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.generation.decoding import Decoder
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource
from flexinspect_hooks.proofs.hidden_states import patch_rows
from flexinspect_hooks.proofs.leak_path import OUTPUT_PROJECTIONS
from flexinspect_hooks.proofs.proof_subject import OnProgress

MAX_MAKERS = 4
"""Maximum number of layers in which single modules are tried."""
Context = AbstractContextManager[Any]


class Rerun:
    """A recorded generation on its model, that runs again at one step, any number of times.

    `token_ids` are those that it chose before the step; its cache is computed once.
    """

    def __init__(
        self,
        model: Any,
        prompt: Prompt,
        source: MaskSource,
        token_ids: Sequence[int] = (),
        *,
        compiled: bool = False,
        threads: int | None = None,
    ) -> None:
        self.model, self._prompt, self._source = model, prompt, source
        self._token_ids, self._compiled, self._threads = list(token_ids), compiled, threads
        named = decoder_blocks(model, attention_layers(model))
        self.blocks = {layer: block for layer, (_, block) in named.items()}
        self.names = {layer: name for layer, (name, _) in named.items()}
        self._cache = self._prefix_cache()  # now: hooks on a run must not see these forwards

    def run(self, *contexts: Context) -> Tensor:
        """Run the forward of the step within `contexts`; return its newest logits (V,), float32."""
        with self._patched():
            decoder = Decoder(self.model, self._prompt)
            decoder.set_state(self._token_ids, copy.deepcopy(self._cache))
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                return decoder.next_logits().float()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.no_grad(), FlexPatch(self.model, self._source, compiled=self._compiled):
            yield

    def _prefix_cache(self) -> Any:
        """Return the cache before the step."""
        decoder = Decoder(self.model, self._prompt)
        with self._patched():
            for token_id in self._token_ids:
                decoder.choose(decoder.next_logits(), token_id)
        return decoder.cache

    def with_inputs_of(self, a: Rerun) -> Rerun | None:
        """Return this run with the cached keys and values of `a`; None if the layers differ."""
        fed, cache = copy.copy(self), copy.deepcopy(a._cache)
        if not self._token_ids:
            return fed
        if self.blocks.keys() != a.blocks.keys():
            return None
        for layer, own in zip(cache.layers, self._cache.layers, strict=True):
            if layer.keys.shape != own.keys.shape:
                return None
            layer.keys, layer.values = layer.keys.to(own.keys), layer.values.to(own.values)
        fed._cache = cache
        return fed

    def outputs(self, layers: Sequence[int], *contexts: Context) -> list[Tensor]:
        """Run within `contexts`; return the outputs (1, rows, width) of some layers."""
        points = [CapturePoint(layer, self.blocks[layer]) for layer in layers]
        return capture_rows(points, lambda: self.run(*contexts))

    def leaves(self, layer: int) -> dict[str, nn.Module]:
        """Return the modules of a layer that have no modules within, by their name in the layer."""
        named = self.blocks[layer].named_modules()
        return {name: module for name, module in named if name and not any(module.children())}


class RecordedStep(Struct, frozen=True):
    """What A's trace has of the step: hidden states (1, rows, width) by layer, and its logits.

    Without all logits, `token_ids` are those of the candidates that `logits` belong to.
    """

    hidden: Mapping[int, Tensor]
    logits: Tensor
    token_ids: tuple[int, ...] | None = None

    def logits_difference(self, logits: Tensor) -> float:
        """Return the relative difference of other logits (V,) from these."""
        chosen = logits if self.token_ids is None else logits[list(self.token_ids)]
        return _difference(self.logits, chosen)


def bisect_runs(
    request: BisectRequest, *, load_report: OnLoadProgress, report: OnProgress
) -> Bisection:
    """Run B again with tensors of A. Raises `UsageError` where A or B does not allow it."""
    number, partner = request.generations
    with open_trace(request.a) as reader_a, open_trace(request.b) as reader_b:
        recorded = _read_step(reader_a, number, request)
        b = _rerun_of(reader_b, partner, request.step, load_report)
        notes: list[str] = []
        try:
            a: Rerun | None = _rerun_of(reader_a, number, request.step, load_report)
        except FlexInspectError as error:
            a = None
            notes.append(f"A does not run again, so modules are not told apart: {error.message}")
        notes += _check_rerun(reader_b, partner, request, b)
        return bisect(b, a, recorded, request, report=report, notes=notes)


def bisect(
    b: Rerun,
    a: Rerun | None,
    recorded: RecordedStep,
    request: BisectRequest,
    *,
    report: OnProgress = lambda text, fraction: None,
    notes: Sequence[str] = (),
) -> Bisection:
    """Find the layers and modules of B that make its difference from the recorded step of A.

    Without `a`, a run of A again, modules within layers are not told apart.
    """
    report("running B again", None)
    logits = recorded.logits_difference(b.run())
    notes, fed = list(notes), b if a is None else b.with_inputs_of(a)
    if request.step and (a is None or fed is None):
        notes.append("The cached keys of earlier steps are those of B: layers may only carry them.")
    fed = fed or b
    layers = _layer_results(b, fed, recorded, request)
    report("putting in A's outputs", None)
    put_in = tuple(_search(fed, recorded, request))
    modules: list[ModuleResult] = []
    makers = [layer for layer in layers if layer.makes][:MAX_MAKERS]
    for index, layer in enumerate(makers if a is not None else ()):
        assert a is not None
        report(f"modules of layer {layer.layer}", index / len(makers))
        own = a.outputs([layer.layer])[0]
        apart = _difference(recorded.hidden[layer.layer], own)
        if apart > layer.limit:
            text = f"run again, A differs from its trace by {apart:.2g} in layer {layer.layer}, so "
            notes.append(f"{text}its modules are not told apart.")
        else:
            modules += _module_results(fed, a, layer, request)
    return Bisection(
        request.step, logits, request.logits_limit, put_in, layers, tuple(modules), tuple(notes)
    )


# -- layers ---------------------------------------------------------------------------------------


def _layer_results(
    b: Rerun, fed_run: Rerun, recorded: RecordedStep, request: BisectRequest
) -> tuple[LayerResult, ...]:
    """Compare each aligned layer of B with A's, as it runs, and with A's inputs."""
    partners = [partner for _, partner in request.pairs]
    plain = b.outputs(partners)
    inputs = []
    for (before, before_b), (_, partner) in zip(request.pairs, request.pairs[1:], strict=False):
        first = min(n for n in b.blocks if before_b < n <= partner)  # one without a partner, too
        states = recorded.hidden[before]
        inputs.append(patch_rows(b.blocks[first], range(states.shape[1]), _like(b, states)))
    fed = fed_run.outputs(partners, *inputs)
    results = []
    for index, (layer, partner) in enumerate(request.pairs):
        before_b = request.pairs[index - 1][1] if index else -1
        names = [b.names[n] for n in b.blocks if before_b < n <= partner]
        carried, made = (_difference(recorded.hidden[layer], rows[index]) for rows in (plain, fed))
        name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        results.append(LayerResult(layer, partner, name, carried, made, request.limits[layer]))
    return tuple(results)


def _search(
    b: Rerun, recorded: RecordedStep, request: BisectRequest
) -> Iterator[tuple[int, float]]:
    """Yield the layers at which A's output is put in, and what remains at the logits.

    The first layer is searched from which on the difference is gone, by halving.
    """

    def remaining(index: int) -> float:
        layer, partner = request.pairs[index]
        states = _like(b, recorded.hidden[layer])
        return recorded.logits_difference(b.run(_put_output(b.blocks[partner], states)))

    low, high = 0, len(request.pairs) - 1
    value = remaining(high)
    yield request.pairs[high][0], value
    if value > request.logits_limit:
        return  # what follows the layers makes a difference of its own
    while low < high:
        middle = (low + high) // 2
        value = remaining(middle)
        yield request.pairs[middle][0], value
        low, high = (low, middle) if value <= request.logits_limit else (middle + 1, high)


@contextmanager
def _put_output(module: nn.Module, states: Tensor) -> Iterator[None]:
    """Replace the output of a module, or the first part of it."""

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return (states, *output[1:]) if isinstance(output, tuple) else states

    with module.register_forward_hook(after):
        yield


# -- modules of a layer ---------------------------------------------------------------------------


class _Call(Struct):
    """The arguments and the output of a module in A."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    output: Any = None


def _module_results(
    b: Rerun, a: Rerun, layer: LayerResult, request: BisectRequest
) -> Iterator[ModuleResult]:
    """Yield the modules of a layer that both have, each with A's inputs, and the attention."""
    calls = _record_calls(a, layer.layer)
    leaves = b.leaves(layer.partner)
    shared = [name for name in calls if name in leaves and isinstance(calls[name].output, Tensor)]
    prefix = b.names[layer.partner]
    projection = next((n for n in shared if n.rpartition(".")[2] in OUTPUT_PROJECTIONS), None)
    for name in shared:
        if name == projection:
            made = _attention_difference(b, layer, calls, projection)
            masks = "the executed masks differ" if layer.layer in request.other_masks else ""
            attention = projection.rpartition(".")[0] or "attention"
            where = f"{prefix}.{attention} (mask and kernel)"
            yield ModuleResult(where, made, layer.limit, masks)
        call = calls[name]
        with torch.no_grad():
            output = leaves[name](*_cast(b, call.args), **_cast(b, call.kwargs))
        yield ModuleResult(f"{prefix}.{name}", _difference(call.output, output), layer.limit)


def _record_calls(a: Rerun, layer: int) -> dict[str, _Call]:
    """Return the calls of the innermost modules of a layer of A, in the order in which they ran."""
    calls: dict[str, _Call] = {}

    def keep(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = _Call(args, kwargs, output)

        return after

    with ExitStack() as stack:
        for name, module in a.leaves(layer).items():
            stack.enter_context(module.register_forward_hook(keep(name), with_kwargs=True))
        a.run()
    return calls


def _attention_difference(
    b: Rerun, layer: LayerResult, calls: Mapping[str, _Call], projection: str
) -> float:
    """Return how far the attention output of B is from A's, with A's queries, keys and values."""
    leaves = b.leaves(layer.partner)
    owner = projection.rpartition(".")[0]
    inner = [n for n in calls if n in leaves and n.rpartition(".")[0] == owner and n != projection]
    puts = [_put_output(leaves[n], _like(b, calls[n].output)) for n in inner]
    point = CapturePoint(layer.partner, leaves[projection], is_input=True)
    (rows,) = capture_rows([point], lambda: b.run(*puts))
    return _difference(calls[projection].args[0], rows)


def _cast(b: Rerun, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _like(b, value) if value.is_floating_point() else value.to(b.model.device)
    if isinstance(value, tuple):
        return tuple(_cast(b, one) for one in value)
    return {k: _cast(b, v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _like(b: Rerun, states: Tensor) -> Tensor:
    """Return a tensor in the dtype and on the device of B."""
    return states.to(next(b.model.parameters()))


def _difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return relative_difference(*(each.detach().double().cpu().numpy() for each in (one, other)))


# -- from the traces ------------------------------------------------------------------------------


def _read_step(reader: TraceReader, generation: int, request: BisectRequest) -> RecordedStep:
    """Return A's tensors of the step. Raises `UsageError` without the hidden states of a layer."""
    step = reader.record(generation, request.step)
    if step is None or step.logits is None:
        raise UsageError(f"{reader.path} has no logits of step {request.step}.")
    arrays = {(one.stream, one.layer): one for one in step.arrays}
    missing = [layer for layer, _ in request.pairs if ("hidden", layer) not in arrays]
    if missing:
        raise UsageError(
            f"{reader.path} has no hidden states of layer {missing[0]}, which --bisect puts in.",
            hint="Record A again with --level extreme (and without --layers).",
        )
    hidden = {}
    for layer, _ in request.pairs:
        one = arrays["hidden", layer]
        hidden[layer] = torch.from_numpy(np.array(to_float32(one.array, one.dtype)))[None]
    row = arrays.get(("logits.row", None))
    if row is not None:
        return RecordedStep(hidden, torch.from_numpy(np.array(to_float32(row.array, row.dtype))))
    ids, logits = _candidates(reader, generation, request.step)
    return RecordedStep(hidden, logits, ids)


def _candidates(reader: TraceReader, generation: int, step: int) -> tuple[tuple[int, ...], Tensor]:
    found = reader.candidates(generation, step)
    return tuple(one.token_id for one in found), torch.tensor([one.logit for one in found])


def _check_rerun(
    reader: TraceReader, generation: int, request: BisectRequest, b: Rerun
) -> Iterator[str]:
    """Yield a note if B, run again, does not give the logits of its trace."""
    ids, logits = _candidates(reader, generation, request.step)
    apart = RecordedStep({}, logits, ids).logits_difference(b.run())
    if apart > request.logits_limit:
        yield f"run again, B's logits differ from its trace by {apart:.2g}: see its environment."


def _rerun_of(
    reader: TraceReader, generation: int, step: int, load_report: OnLoadProgress
) -> Rerun:
    """Load the model and the prompt of a recorded generation.

    Raises `UsageError` for a run that is not one of `flexinspect run --model`, and where the prompt
    or the weights are others now; `ModelError` and `DatasetError` as a run does.
    """
    run = reader.run()
    facts = run.get("job")
    if not isinstance(facts, Mapping):
        raise UsageError(
            f"{reader.path} is not of flexinspect run --model, so it cannot be run again.",
            hint="A program of your own can be run with flexinspect.prove, see docs/proofs.md.",
        )
    try:
        job = msgspec.convert({**facts, "out": "", "model": _model_of(facts, run)}, Job)
    except (msgspec.ValidationError, KeyError) as error:
        what = f"The job in the manifest of {reader.path} cannot be read: {error}"
        raise UsageError(what, hint="Record it again with this version of flexinspect.") from error
    samples = load_samples(job)
    source = model_names.resolve(job.model, load_config())
    loaded = capture_process.load_model(job, source, load_report)
    known = reader.model(generation).get("weights_fingerprint")
    if known not in (None, loaded.facts()["weights_fingerprint"]):
        raise UsageError(f"The weights of {job.model} are not those that {reader.path} ran with.")
    compiled = capture_process.is_compiled(job, loaded.device)
    ensemble = EnsembleRunner(loaded, job, compiled=compiled)
    if generation >= len(samples):
        raise UsageError(f"The dataset {job.dataset} has no sample {generation} now.")
    plan = ensemble.plan(samples[generation])
    tokens = reader.tokens(generation)
    prompt = tuple(token.token_id for token in tokens if token.step is None)
    if tuple(plan.prompt.ids) != prompt:
        raise UsageError(f"The prompt of generation {generation} of {reader.path} is another now.")
    chosen = [token.token_id for token in tokens if token.step is not None]
    threads = run.get("threads")
    return Rerun(
        loaded.model,
        plan.prompt,
        plan.source,
        chosen[:step],
        compiled=compiled,
        threads=threads if isinstance(threads, int) else None,
    )


def _model_of(job: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return the model of a job; a relative folder is looked up where the run was started."""
    name = str(job["model"])
    there = Path(str(run.get("cwd", "."))) / name
    return str(there) if not Path(name).exists() and there.is_dir() else name
