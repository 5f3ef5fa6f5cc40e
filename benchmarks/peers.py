"""`python -m benchmarks peers`: what recording costs with flexinspect and with other libraries.

The same greedy `generate` of transformers runs bare and under each recorder, in turns within one
process, and each recorded block lies between two bare ones. The whole block is timed: attaching,
generation, detaching and, for flexinspect, opening and closing the trace. The other libraries keep
tensors in a list; flexinspect reduces them, checks them and writes a trace.

Libraries that are not installed are left out: `pip install 'flexinspect[bench]'` has them.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

import flexinspect
from benchmarks.common import (
    NEW,
    Block,
    bench_prompt,
    cell,
    clocks,
    markdown,
    milliseconds,
    sandwiched,
)
from flexinspect.core.errors import FlexInspectError, summarize_error
from flexinspect.records.step import LEVELS


class Generation:
    """A greedy `generate` of a model after one prompt."""

    def __init__(self, model: Any, prompt_ids: tuple[int, ...], tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.ids = torch.tensor([prompt_ids])
        self.inputs = {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)}
        self.options = {"max_new_tokens": tokens, "do_sample": False}

    @property
    def layers(self) -> Any:
        """The decoder layers."""
        return self.model.model.layers

    def run(self) -> None:
        """Generate, recorded by whatever is attached."""
        self.model.generate(**self.inputs, **self.options)


Recorded = Callable[[], int]
"""Generates once under a recorder and returns how many tensors, or steps, it kept."""


class Recorder(Struct, frozen=True):
    """A way to record a generation.

    `attach` prepares what a program does once (wrapping the model) and returns the recorded block.
    `package` is the distribution that it needs. `takes_block_masks` is False for a recorder that
    computes attention itself.
    """

    name: str
    keeps: str
    attach: Callable[[Generation], Recorded]
    module: str = ""
    package: str = ""
    takes_block_masks: bool = True


def plain_hooks(generation: Generation) -> Recorded:
    """Keep the output of each layer and the logits with forward hooks of torch."""

    def recorded() -> int:
        kept: list[Any] = []
        modules = [*generation.layers, generation.model.lm_head]
        handles = [
            module.register_forward_hook(lambda _m, _a, output: kept.append(output))
            for module in modules
        ]
        try:
            generation.run()
        finally:
            for handle in handles:
                handle.remove()
        return len(kept)

    return recorded


def pyvene_collect(generation: Generation) -> Recorded:
    """Collect the output of each layer at each generated token with pyvene."""
    import pyvene

    each = {"component": "block_output", "intervention_type": pyvene.CollectIntervention}
    layers = [{"layer": number, **each} for number in range(len(generation.layers))]
    model = pyvene.IntervenableModel(pyvene.IntervenableConfig(layers), model=generation.model)

    def recorded() -> int:
        (_, kept), _ = model.generate(dict(generation.inputs), **generation.options)
        return len(kept)

    return recorded


def nnsight_outputs(generation: Generation) -> Recorded:
    """Save the output of each layer and the logits at each step with nnsight."""
    import nnsight

    model, n_layers, n_tokens = (
        _nnsight_model(generation),
        len(generation.layers),
        generation.tokens,
    )

    def recorded() -> int:
        with model.generate(**generation.inputs, **generation.options) as tracer:
            kept = nnsight.save([])
            for _ in tracer.iter[:n_tokens]:
                for number in range(n_layers):
                    kept.append(model.model.layers[number].output)
                kept.append(model.lm_head.output)
        return len(kept)

    return recorded


def nnsight_qkv(generation: Generation) -> Recorded:
    """Save the projections q, k and v and the output of each layer at each step with nnsight."""
    import nnsight

    model, n_layers, n_tokens = (
        _nnsight_model(generation),
        len(generation.layers),
        generation.tokens,
    )

    def recorded() -> int:
        with model.generate(**generation.inputs, **generation.options) as tracer:
            kept = nnsight.save([])
            for _ in tracer.iter[:n_tokens]:
                for number in range(n_layers):
                    layer = model.model.layers[number]
                    kept.append(layer.self_attn.q_proj.output)
                    kept.append(layer.self_attn.k_proj.output)
                    kept.append(layer.self_attn.v_proj.output)
                    kept.append(layer.output)
                kept.append(model.lm_head.output)
        return len(kept)

    return recorded


def _nnsight_model(generation: Generation) -> Any:
    from nnsight.modeling.transformers import TransformersModel

    return TransformersModel(generation.model, tokenizer=_tokenizer())


def lens_bridge(generation: Generation) -> Recorded:
    """Keep the output of each block with the bridge of TransformerLens.

    The bridge puts its own modules into the model, so it gets a copy.
    """
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(
        "bench", hf_model=copy.deepcopy(generation.model), tokenizer=_tokenizer(), device="cpu"
    )
    names = [f"blocks.{number}.hook_out" for number in range(len(generation.layers))]

    def recorded() -> int:
        kept: list[Any] = []
        with bridge.hooks(fwd_hooks=[(name, lambda x, hook: kept.append(x)) for name in names]):
            bridge.original_model.generate(**generation.inputs, **generation.options)
        return len(kept)

    return recorded


def _tokenizer() -> Any:
    """Return a tokenizer, which the libraries ask for and these runs never call."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"<unk>": 0, "</s>": 2}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


def watched(level: str) -> Callable[[Generation], Recorded]:
    """Return the recorder `flexinspect.watch` at a level, into a trace on the disk."""

    def attach(generation: Generation) -> Recorded:
        def recorded() -> int:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "peers.flextrace"
                with flexinspect.watch(generation.model, out=path, level=level):
                    generation.run()
                return path.stat().st_size

        return recorded

    return attach


RECORDERS = (
    Recorder("plain hooks", "layer outputs, logits", plain_hooks),
    Recorder("pyvene", "layer outputs", pyvene_collect, "pyvene", "pyvene"),
    Recorder("nnsight", "layer outputs, logits", nnsight_outputs, "nnsight", "nnsight"),
    Recorder("nnsight, q k v", "the same, q, k, v", nnsight_qkv, "nnsight", "nnsight"),
    Recorder(
        *("TransformerLens bridge", "layer outputs", lens_bridge),
        *("transformer_lens", "transformer-lens"),
        takes_block_masks=False,
    ),
    *(Recorder(f"flexinspect {name}", "a trace, checked", watched(name)) for name in LEVELS),
)

KERNELS: Mapping[str, str] = {
    "sdpa": "`scaled_dot_product_attention`",
    "flex-uncompiled": "transformers' FlexAttention, uncompiled",
    "flex-compiled": "transformers' FlexAttention, compiled",
}
"""The attention of the generations, and how the tables name it."""


@contextmanager
def kernel(model: Any, name: str) -> Iterator[None]:
    """Run the model's attention with a kernel of `KERNELS`, and with its own one afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if name == "sdpa" else "flex_attention")
    is_eager = name == "flex-uncompiled"
    try:
        with torch.compiler.set_stance("force_eager") if is_eager else nullcontext():
            yield
    finally:
        model.set_attn_implementation(before)


def measure(
    model: Any,
    seconds: float,
    tokens: int = NEW,
    *,
    recorders: tuple[Recorder, ...] = RECORDERS,
    kernels: tuple[str, ...] = tuple(KERNELS),
) -> dict[str, Any]:
    """Return the ratios to the bare generation per kernel and recorder, and what was left out.

    `seconds` are shared by the kernels.
    """
    generation = Generation(model, bench_prompt(tokens).ids, tokens)
    facts: dict[str, Any] = {"tokens": tokens, "versions": _versions(recorders), "kernels": {}}
    for name in kernels:
        print(f"{KERNELS[name]}: {seconds / len(kernels):.0f} s or more", file=sys.stderr)
        with kernel(model, name):
            facts["kernels"][name] = measure_kernel(
                generation, recorders, name, seconds / len(kernels)
            )
    return facts


def _versions(recorders: tuple[Recorder, ...]) -> dict[str, str]:
    found = {}
    for package in {one.package for one in recorders if one.package}:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return dict(sorted(found.items()))


def measure_kernel(
    generation: Generation, recorders: tuple[Recorder, ...], name: str, seconds: float
) -> dict[str, Any]:
    """Return the ratios of the recorders that run with this kernel, and why others do not."""
    try:
        generation.run()
    except Exception as error:  # of the compiler: then there is nothing to compare with
        return {"left_out": [f"The bare generation does not run: {summarize_error(error)}"]}
    left_out: list[str] = []
    attached: dict[str, Recorded] = {}
    for recorder in recorders:
        try:
            attached[recorder.name] = _attach(generation, recorder, name)
        except FlexInspectError as error:
            left_out.append(error.message)
    if not attached:
        return {"left_out": left_out}
    blocks = {each: (lambda run=run: _timed(run)) for each, run in attached.items()}
    found = sandwiched(lambda: _timed(generation.run), blocks, seconds=seconds)
    bare = [one.bottom("wall") / generation.tokens for each in found.values() for one in each]
    return {
        "ms_per_token": milliseconds(bare),
        "recorders": {each: clocks(one) for each, one in found.items()},
        "left_out": list(dict.fromkeys(left_out)),
    }


def _attach(generation: Generation, recorder: Recorder, name: str) -> Recorded:
    """Return a recorded block that has run once. Raises `FlexInspectError` with why it cannot."""
    if recorder.module and find_spec(recorder.module) is None:
        raise FlexInspectError(
            f"{recorder.package} is not installed: pip install 'flexinspect[bench]'."
        )
    if name != "sdpa" and not recorder.takes_block_masks:
        raise FlexInspectError(f"{recorder.name} computes attention itself: no FlexAttention.")
    try:
        recorded = recorder.attach(generation)
        kept = recorded()
    except Exception as error:
        text = summarize_error(error)
        raise FlexInspectError(f"{recorder.name} does not run here: {text}") from error
    if not kept:
        raise FlexInspectError(f"{recorder.name} kept nothing of this generation.")
    return recorded


def _timed(run: Callable[[], Any]) -> Block:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Block(time.perf_counter() - wall, time.process_time() - cpu)


def table(facts: Mapping[str, Any]) -> str:
    """Return a table in Markdown for each kernel, and what was left out."""
    parts = [_kernel_table(name, found) for name, found in facts["kernels"].items()]
    libraries = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return "\n\n".join([*parts, f"Libraries: {libraries}."] if libraries else parts)


def _kernel_table(name: str, found: Mapping[str, Any]) -> str:
    left_out = "\n".join(f"Left out: {text}" for text in found["left_out"])
    if "recorders" not in found:
        return f"{KERNELS[name]}\n\n{left_out}"
    keeps = {one.name: one.keeps for one in RECORDERS}
    rows = [
        [each, keeps.get(each, ""), cell(one["wall"]), cell(one["cpu"]), _blocks(one["wall"])]
        for each, one in found["recorders"].items()
    ]
    head = ["recorder", "keeps", "whole block", "CPU time", "blocks"]
    title = f"{KERNELS[name]}, {found['ms_per_token']:.1f} ms per token bare"
    return "\n\n".join(filter(None, (title, markdown(head, rows), left_out)))


def _blocks(found: Mapping[str, Any]) -> str:
    return f"{found['rounds']} of {found['rounds'] + found.get('left_out', 0)}"
