"""The TensorBoard log folder, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.earlier_traces import unpack
from support.exporting import export
from support.png import read_png
from support.traces import (
    HEADS,
    LAYERS,
    N_PROMPT,
    RUN,
    SEGMENTS,
    sample_generation,
    sample_step,
    sample_trace,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flexinspect.exports import trace_mask_images
from flexinspect.masks import mask_presets
from flexinspect.masks.viewport import CLOSED, LEAKED, OPEN
from flexinspect.panels.mask.mask_pixels import mask_palette
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace


def read(folder: Path, run: str = "generation-0") -> EventAccumulator:
    """Return all events of a run."""
    everything = {"scalars": 0, "images": 0, "histograms": 0}
    return EventAccumulator(str(folder / run), size_guidance=everything).Reload()


def scalars(run: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in run.Scalars(tag)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_trace(tmp_path_factory.mktemp("tensorboard") / "run.flextrace")


@pytest.fixture(scope="module")
def run(path: Path) -> EventAccumulator:
    return read(export(path, "tensorboard"))


def test_scalars_are_the_recorded_values_of_each_step(path: Path, run: EventAccumulator) -> None:
    with open_trace(path) as reader:
        steps = reader.steps(0)
        rss = [reader.memory(0, step.step) for step in steps]
    numbers = list(range(6))
    for tag, values in {
        "logits/entropy": [step.entropy for step in steps],
        "logits/margin": [step.margin for step in steps],
        "logits/chosen_probability": [math.exp(step.chosen_logprob or 0) for step in steps],
        "time/wall_ms": [step.wall_ms for step in steps],
        "time/capture_ms": [step.capture_ms for step in steps],
        "memory/rss": [memory.rss for memory in rss if memory is not None],
    }.items():
        expected = list(zip(numbers, np.float32(values).tolist(), strict=True))
        assert scalars(run, tag) == expected, tag


def test_events_have_the_recorded_wall_time(run: EventAccumulator) -> None:
    times = [event.wall_time for event in run.Scalars("logits/entropy")]
    assert times == pytest.approx([1000.0 + n + (12.5 + n) / 1e3 for n in range(6)], abs=1e-6)


def test_the_histogram_of_the_logits_is_the_recorded_one(run: EventAccumulator) -> None:
    value = run.Histograms("logits/all")[2].histogram_value
    assert (value.min, value.max, value.num, list(value.bucket)) == (-8, 9, 17, [1, 4, 9, 3])
    assert list(value.bucket_limit) == [-3.75, 0.5, 4.75, 9.0]


def test_histograms_of_attention_count_each_layer_and_head(run: EventAccumulator) -> None:
    entropy = run.Histograms("attention/entropy")
    assert [event.histogram_value.num for event in entropy] == [LAYERS * HEADS] * 6
    assert entropy[3].histogram_value.max == pytest.approx(1.8)
    mass = run.Histograms("attention_to/1_paraphrase 1")[0].histogram_value
    assert (mass.num, mass.sum) == (8, pytest.approx(4.0))
    tags = [tag for tag in run.Tags()["histograms"] if tag.startswith("attention_to")]
    assert len(tags) == len(SEGMENTS)


def picture(image: Any) -> Any:
    """Return the pixels of an image summary, checked against its declared size."""
    pixels = read_png(image.encoded_image_string)
    assert pixels.shape == (image.height, image.width, 3)
    return pixels


def test_a_mask_picture_shows_the_mask_up_to_its_step(run: EventAccumulator) -> None:
    images = run.Images("mask/layers 0-3")
    assert [image.step for image in images] == list(range(6))
    spec, rgb = mask_presets.preset("segment-isolation", SEGMENTS), mask_palette().rgb
    for image in images:
        size = N_PROMPT + image.step
        zoom = 256 // size
        expected = np.full((size, size, 3), rgb[CLOSED], np.uint8)
        expected[spec.dense(size, size)] = rgb[OPEN]
        assert np.array_equal(picture(image)[::zoom, ::zoom], expected)


def test_layers_with_different_masks_have_different_pictures(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "run.flextrace", RUN) as writer:
        writer.begin_generation(sample_generation(0))
        step = sample_step(0)
        (mask,) = step.masks
        assert mask.cells is not None
        cells = mask.cells.copy()
        cells[0, 6, 1] = True  # a leak from paraphrase 2 to paraphrase 1
        leaky = replace(mask, fingerprint="leaky", cells=cells)
        calls = tuple(replace(c, mask="leaky") if c.layer == 2 else c for c in step.calls)
        writer.write_step(replace(step, masks=(mask, leaky), calls=calls))
    found = read(export(tmp_path / "run.flextrace", "tensorboard"))
    assert found.Tags()["images"] == ["mask/layers 0-1, 3", "mask/layer 2"]
    (image,) = found.Images("mask/layer 2")
    zoom = 256 // N_PROMPT
    leaks = np.argwhere((picture(image)[::zoom, ::zoom] == mask_palette().rgb[LEAKED]).all(2))
    assert leaks.tolist() == [[6, 1]]


def test_only_some_steps_of_a_long_generation_have_pictures(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "run.flextrace", generations=1, steps=30)
    images = read(export(path, "tensorboard")).Images("mask/layers 0-3")
    assert len(images) == trace_mask_images.N_STEPS
    assert (images[0].step, images[-1].step) == (0, 29)


def test_a_training_has_its_loss_norms_and_learning_rates(tmp_path: Path) -> None:
    path = unpack("training", tmp_path)
    run = read(export(path, "tensorboard"))
    with open_trace(path) as reader:
        steps = reader.training_steps(0)
    losses = [(number, step.loss) for number, step in steps.items()]
    assert len(losses) == 16
    assert plain(scalars(run, "training/loss")) == plain(losses)
    norms = [(n, step.total_norm) for n, step in steps.items() if step.total_norm is not None]
    assert plain(scalars(run, "gradients/total_norm")) == plain(norms)
    rates = [(number, step.learning_rates[1]) for number, step in steps.items()]
    assert plain(scalars(run, "learning_rate/group_1")) == plain(rates)
    groups = {tag.partition("/")[2] for tag in run.Tags()["scalars"] if "gradient_norm" in tag}
    assert groups == {"layers.0", "layers.1", "layers.2", "unused", "head"}


def plain(points: list[tuple[int, float]]) -> list[tuple[int, str]]:
    """Return points with their values as text, at the precision of the file."""
    return [(step, str(np.float32(value))) for step, value in points]


def test_branches_are_runs_of_their_own(tmp_path: Path) -> None:
    path = unpack("branches", tmp_path)
    folder = export(path, "tensorboard")
    names = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    assert names == {"generation-0", *(f"generation-0-branch-{n}" for n in range(1, 5))}
    with open_trace(path) as reader:
        for branch in range(1, 5):
            events = scalars(read(folder, f"generation-0-branch-{branch}"), "time/wall_ms")
            assert [step for step, _ in events] == [s.step for s in reader.steps(0, branch)]


def test_neither_torch_nor_tensorflow_is_imported(path: Path, tmp_path: Path) -> None:
    """A `tensorflow` that is installed beside TensorBoard is not imported either."""
    (tmp_path / "tensorflow.py").write_text("raise SystemError('imported')\n")
    code = (
        "import sys; from flexinspect.cli.main import main; sys.path.insert(0, sys.argv[3]); "
        "code = main(['export', sys.argv[1], '--to', 'tensorboard', '-o', sys.argv[2]]); "
        "print(code, {'torch', 'tensorflow'} & {*sys.modules})"
    )
    arguments = [sys.executable, "-c", code, path, tmp_path / "logs", tmp_path]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"
