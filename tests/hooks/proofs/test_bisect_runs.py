"""`diff --bisect`: the module that makes a difference, told from those that carry it."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict
from support.branching import CPU, preset_source
from support.tiny import make_model, make_pieces
from torch import nn

from flexinspect.analysis.run_diff.bisection import Bisection, BisectRequest, bisection_lines
from flexinspect.cli.main import main
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.job_samples import load_samples
from flexinspect.records.job import Job
from flexinspect.records.prompt import compose_prompt
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.generation.mask_source import UserMaskSource
from flexinspect_hooks.loading.model_loader import load
from flexinspect_hooks.proofs.bisect_runs import RecordedStep, Rerun, bisect
from flexinspect_hooks.sessions.capture_session import CaptureSession

LAYERS = 4
PROMPT = compose_prompt(make_pieces(), max_new_tokens=4)
CHOSEN = (7, 8)
"""Tokens before the step that runs again: a step with a cache."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than these small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rerun(model: Any, *, step: int = 0, source: Any = None, threads: int | None = None) -> Rerun:
    return Rerun(model, PROMPT, source or preset_source(PROMPT), CHOSEN[:step], threads=threads)


def bisected(
    b: Rerun, a: Rerun, *, pairs: Any = None, limit: float = 1e-5, masks: tuple[int, ...] = ()
) -> Bisection:
    layers = list(a.blocks)
    hidden = dict(zip(layers, (rows.float() for rows in a.outputs(layers)), strict=True))
    recorded = RecordedStep(hidden, a.run())
    pairs = pairs or tuple((n, n) for n in layers)
    limits = dict.fromkeys(layers, limit)
    request = BisectRequest("", "", (0, 0), len(b._token_ids), pairs, limits, limit, masks)
    return bisect(b, a, recorded, request)


def model_with(layer: int, name: str, change: Any) -> Any:
    """Return the tiny model with one parameter changed."""
    model = make_model("llama", num_hidden_layers=LAYERS)
    weight = model.model.layers[layer].get_parameter(name)
    with torch.no_grad():
        change(weight)
    return model


def perturb(weight: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=generator))


@pytest.fixture(scope="module")
def a() -> Rerun:
    return rerun(make_model("llama", num_hidden_layers=LAYERS))


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize(
    "name", ["self_attn.o_proj", "self_attn.k_proj", "mlp.down_proj", "post_attention_layernorm"]
)
def test_a_module_with_other_weights_makes_the_difference_and_later_layers_carry_it(
    name: str, step: int
) -> None:
    a = rerun(make_model("llama", num_hidden_layers=LAYERS), step=step)
    b = rerun(model_with(1, f"{name}.weight", perturb), step=step)
    found = bisected(b, a)
    assert found.makers == (f"model.layers.1.{name}",)
    assert [one.layer for one in found.layers if one.carries] == [2, 3]
    remains = dict(found.put_in)
    assert remains[1] <= 1e-5 < remains[0]


def test_in_a_step_with_a_cache_a_note_says_where_the_keys_are_those_of_b() -> None:
    one, other = (make_model("llama", num_hidden_layers=n) for n in (LAYERS, LAYERS + 1))
    pairs = tuple((n, n) for n in range(LAYERS))
    found = bisected(rerun(other, step=2), rerun(one, step=2), pairs=pairs)
    assert any("cached keys of earlier steps are those of B" in note for note in found.notes)


def test_two_modules_are_both_named(a: Rerun) -> None:
    model = model_with(0, "mlp.up_proj.weight", perturb)
    with torch.no_grad():
        perturb(model.model.layers[2].self_attn.v_proj.weight)
    makers = bisected(rerun(model), a).makers
    assert makers == ("model.layers.0.mlp.up_proj", "model.layers.2.self_attn.v_proj")


def test_a_head_that_differs_is_told_from_the_layers(a: Rerun) -> None:
    model = make_model("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        perturb(model.lm_head.weight)
    found = bisected(rerun(model), a)
    assert found.makers == ("the final norm or the output head",)
    assert not any(layer.makes or layer.carries for layer in found.layers)


@contextmanager
def other_mask_in(model: Any, layer: int) -> Iterator[None]:
    """Give one layer a causal mask in place of the segments'."""
    from flexinspect_hooks.generation.mask_source import ForwardWindow

    causal = UserMaskSource(lambda b, h, q, kv: kv <= q, name="causal", device=CPU)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        n = args[0].shape[1] if args else kwargs["hidden_states"].shape[1]
        mask = causal.block_mask(ForwardWindow(n, n, 0), None)
        return args, {**kwargs, "attention_mask": mask}

    module = model.model.layers[layer].self_attn
    with module.register_forward_pre_hook(before, with_kwargs=True):
        yield


def test_a_swapped_mask_in_one_layer_is_told_from_its_projections(a: Rerun) -> None:
    model = make_model("llama", num_hidden_layers=LAYERS)
    with other_mask_in(model, 2):
        found = bisected(rerun(model), a, masks=(2,))
    assert found.makers == ("model.layers.2.self_attn (mask and kernel)",)
    assert [one.layer for one in found.layers if one.carries] == [3]
    text = "\n".join(bisection_lines(found))
    assert "(mask and kernel): " in text
    assert "the executed masks differ" in text
    assert text.endswith("self_attn (mask and kernel); layer 3 carries it.")


def with_layer_after(model: Any, layer: int, *, scale: float) -> Any:
    """Insert a copy of a layer that adds `scale` times what it adds; 0 is no operation."""
    extra = copy.deepcopy(model.model.layers[layer])
    with torch.no_grad():
        extra.self_attn.o_proj.weight.mul_(scale)
        extra.mlp.down_proj.weight.mul_(scale)
    model.model.layers.insert(layer + 1, extra)
    for index, one in enumerate(model.model.layers):
        one.self_attn.layer_idx = index
    model.config.num_hidden_layers += 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = ["full_attention"] * model.config.num_hidden_layers
    return model


@pytest.mark.parametrize(("scale", "makers"), [(0.0, 0), (0.01, 1)])
def test_an_inserted_layer_makes_a_difference_only_if_it_does_something(
    scale: float, makers: int, a: Rerun
) -> None:
    model = with_layer_after(make_model("llama", num_hidden_layers=LAYERS), 1, scale=scale)
    found = bisected(rerun(model), a, pairs=((0, 0), (1, 1), (2, 3), (3, 4)))
    assert len(found.makers) == makers
    if makers:
        assert found.makers == ("model.layers.2 to model.layers.3",)


def test_another_dtype_makes_no_difference_beyond_its_noise(a: Rerun) -> None:
    b = rerun(make_model("llama", num_hidden_layers=LAYERS).to(torch.bfloat16))
    found = bisected(b, a, limit=0.1)
    assert found.makers == ()
    assert all(0 < layer.made < 0.1 for layer in found.layers)


def test_another_number_of_threads_is_equal_within_noise() -> None:
    threads = torch.get_num_threads()
    try:
        one, two = (rerun(make_model("llama", num_hidden_layers=LAYERS), threads=n) for n in (1, 2))
        found = bisected(two, one)
    finally:
        torch.set_num_threads(threads)
    assert found.makers == ()
    text = "\n".join(bisection_lines(found))
    assert text.endswith("No module makes a difference beyond noise out of A's tensors.")


# -- from traces ----------------------------------------------------------------------------------


def record(out: Path, model: str, **options: Any) -> Path:
    """Record a generation of a model as the capture process does."""
    options = {"level": "extreme", "dtype": "float32", "max_new_tokens": 2, **options}
    job = Job(out=str(out), model=model, **options)
    loaded = load(model_names.resolve(model, load_config()), device="cpu", dtype=job.dtype)
    ensemble = EnsembleRunner(loaded, job, compiled=False)
    facts = {name: value for name, value in asdict(job).items() if name not in ("out", "serving")}
    run = {"job": facts, "model": loaded.facts(), "cwd": str(Path.cwd())}
    with TraceWriter.create(out, run) as writer:
        with CaptureSession(
            loaded.model, writer, level=job.level, text_of=ensemble.vocabulary.text_of
        ) as session:
            ensemble.run(0, ensemble.plan(load_samples(job)[0]), session)
    return out


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The demo model, a copy with a perturbed o_proj, and a trace without hidden states."""
    folder = tmp_path_factory.mktemp("bisect")
    source = model_names.resolve("demo", load_config())
    loaded = load(source, device="cpu", dtype="float32")
    with torch.no_grad():
        perturb(loaded.model.model.layers[2].self_attn.o_proj.weight)
    shutil.copytree(str(source.place), folder / "changed")
    loaded.model.save_pretrained(folder / "changed")
    return (
        record(folder / "a.flextrace", "demo"),
        record(folder / "b.flextrace", str(folder / "changed")),
        record(folder / "c.flextrace", "demo", level="advanced"),
    )


def test_the_command_names_the_module_from_two_traces(
    traces: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, _ = map(str, traces)
    assert main(["diff", a, b, "--bisect", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["bisection"]
    assert found["makers"] == ["model.layers.2.self_attn.o_proj"]
    assert found["carriers"] == [3]
    assert found["notes"] == []


def test_what_cannot_be_bisected_is_said_in_a_sentence(
    traces: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = map(str, traces)
    broken = tmp_path / "broken.flextrace"
    shutil.copy(b, broken)
    with closing(sqlite3.connect(broken)) as db, db:
        db.execute('UPDATE run SET value = \'{"model": "demo", "seed": "x"}\' WHERE key = \'job\'')
    cases = {
        (a, str(broken)): "The job in the manifest of",
        (c, b): "has no hidden states of layer 0, which --bisect puts in",
        (a, a): "There is nothing to bisect: no compared number of a step differs.",
    }
    for pair, sentence in cases.items():
        assert main(["diff", *pair, "--bisect"]) == 2
        assert sentence in capsys.readouterr().err
    changed = json.loads((traces[1].parent / "changed" / "config.json").read_text())
    assert changed["num_hidden_layers"] == 4
    shutil.rmtree(traces[1].parent / "changed")
    assert main(["diff", a, b, "--bisect"]) == 2
    assert "There is no model folder" in capsys.readouterr().err
    assert main(["diff", a, b, "--bisect", "--ui"]) == 2
    assert "--ui and --bisect exclude each other" in capsys.readouterr().err
