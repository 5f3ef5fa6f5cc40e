"""A small trace with everything in it, made without torch: what the interface's tests look at."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from flexinspect.masks import mask_presets
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    ArrayRecord,
    CallRecord,
    Candidate,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter

PROMPT = (
    ("<s>", "", 0),
    ("ĠWho", "Who", 1),
    ("Ġwrote", " wrote", 1),
    ("ĠEmma", " Emma", 1),
    ("?", "?", 1),
    ("Ċ", "\n", 2),
    ("Emma", "Emma", 3),
    ("'s", "'s", 3),
    ("Ġ作者", " 作者", 3),
    ("🗼", "🗼", 3),
    ("Ċ", "\n", 4),
    ("Answer", "Answer", 5),
    (":", ":", 5),
)
ANSWER = ("ĠJane", "ĠAus", "ten", "\x1b[31m", "Ġ.", "</s>")
TEXTS = (" Jane", " Aus", "ten", "\x1b[31m", " .", "")
N_PROMPT = len(PROMPT)
LAYERS, HEADS = 4, 2
KINDS = SegmentKind
SEGMENTS = (
    Segment(0, 1, "bos", KINDS.BOS, 0),
    Segment(1, 5, "paraphrase 1", KINDS.PARAPHRASE, 1),
    Segment(5, 6, "separator 1", KINDS.SEPARATOR, 1),
    Segment(6, 10, "paraphrase 2", KINDS.PARAPHRASE, 3),
    Segment(10, 11, "separator 2", KINDS.SEPARATOR, 3),
    Segment(11, 13, "cue", KINDS.CUE, 5),
    Segment(13, 13 + len(ANSWER), "generated", KINDS.GENERATED, 6),
)
RUN = {
    "model": {
        "name": "sample",
        "class": "LlamaForCausalLM",
        "device": "cpu",
        "dtype": "float32",
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": 1,
        "hidden": 8,
        "parameters": 1000,
    },
    "level": "advanced",
    "seed": 0,
    "pid": 1,
    "started_at": 1000.0,
    "argv": ["flexinspect", "run", "--model", "sample"],
    "versions": {"python": "3.11", "torch": "2.13"},
}


def sample_trace(
    path: Path,
    *,
    generations: int = 2,
    steps: int = len(ANSWER),
    nan_at: tuple[int, int] | None = (3, 2),
    finish: bool = True,
) -> Path:
    """Write a trace of level advanced; a NaN appears in generation 0 at `nan_at` (step, layer)."""
    writer = TraceWriter.create(path, RUN)
    for number in range(generations):
        writer.begin_generation(sample_generation(number))
        for step in range(steps):
            bad = nan_at if number == 0 else None
            writer.write_step(sample_step(step, number, nan_at=bad))
        if finish:
            end = ("finished", " Jane Austen", SEGMENTS, "eos", 1010.0)
            writer.end_generation(GenerationEnd(number, *end))
    if finish:
        writer.update_run(cost={"ratio": 0.021, "capture_s": 0.1, "writer_s": 0.2, "total_s": 5.0})
        writer.write_event(EventRecord("phase", "done", 1011.0))
        writer.close()
    else:
        writer._db.close()  # as a killed process leaves it
    return path


def sample_generation(number: int) -> GenerationRecord:
    """Return the prompt of a generation."""
    segment_of = [number for _, _, number in PROMPT]
    tokens = tuple(
        TokenRecord(pos, 10 + pos, token, text, pos, segment_of[pos], pos == 0)
        for pos, (token, text, _) in enumerate(PROMPT)
    )
    spec = mask_presets.preset("segment-isolation", SEGMENTS)
    declared = {
        "preset": "segment-isolation",
        "separators": "attached",
        "starts": list(spec.starts),
        "prefix_stops": list(spec.prefix_stops),
        "local_starts": list(spec.local_starts),
    }
    return GenerationRecord(
        *(number, f"sample-{number}", "segment-isolation", "contiguous", SEGMENTS, tokens),
        ("Jane Austen",),
        declared,
        1000.0,
    )


def sample_step(
    step: int, generation: int = 0, *, nan_at: tuple[int, int] | None = None
) -> StepRecord:
    """Return one step: the prefill is step 0; each chooses one token of the answer."""
    pos = N_PROMPT + step
    bad = nan_at is not None and step >= nan_at[0]
    mask = _mask(step, generation)
    chosen = step % len(ANSWER)
    token = TokenRecord(
        *(pos, 50 + chosen, ANSWER[chosen], TEXTS[chosen], pos, 6),
        chosen == len(ANSWER) - 1,
        step,
    )
    findings = ()
    if nan_at is not None and step == nan_at[0]:
        findings = (
            Finding(
                "numbers.nan",
                Severity.ERROR,
                f"Layer {nan_at[1]} made the first NaN.",
                *(generation, 0, step, nan_at[1], None, (pos,)),
                {"n_nan": 3},
            ),
        )
    return StepRecord(
        *(generation, step, "decode" if step else "prefill", 1 if step else N_PROMPT),
        *(pos - 1 if step else 0, pos, 1000.0 + step, 12.5 + step, 0.25),
        logits=_logits(step, chosen),
        tokens=(token,),
        calls=tuple(_call(layer, mask, step) for layer in range(LAYERS)),
        layer_stats=tuple(_stat(layer, step, bad and layer >= nan_at[1]) for layer in range(LAYERS))  # type: ignore[index]
        if bad
        else tuple(_stat(layer, step, False) for layer in range(LAYERS)),
        memory=MemoryRecord(400_000_000 + 1000 * step, 8_000_000, 2048 * pos),
        masks=(mask,),
        arrays=_arrays(step, pos),
        findings=findings,
    )


def _mask(step: int, generation: int) -> MaskRecord:
    spec = mask_presets.preset("segment-isolation", SEGMENTS)
    rows = 1 if step else N_PROMPT
    offset = N_PROMPT + step - 1 if step else 0
    n_kv = N_PROMPT + step
    cells = spec.dense(rows, n_kv, q_offset=offset)[None]
    tables = np.ones((1, 1, 1), np.bool_)
    return MaskRecord(
        *(f"{generation:04x}{step:04x}aaaabbbb", "block", 1, 1, rows, n_kv, offset, 0, 128, 128),
        mask_mod="rules.arithmetic",
        mask_mod_source="rules.py:12",
        cells=cells,
        partial=tables,
    )


def _call(layer: int, mask: MaskRecord, step: int) -> CallRecord:
    path = "sdpa" if (step, layer) == (4, 3) else "flex uncompiled"
    return CallRecord(
        *(layer, path, "flexinspect", mask.fingerprint, 1, HEADS, 1, mask.q_len, mask.kv_len, 4),
        *("float32", 0.5, 3e-6, "lse"),
    )


def _stat(layer: int, step: int, bad: bool) -> LayerStatRecord:
    value = math.nan if bad else 1.0 + layer + step / 10
    n_nan = 3 if bad else 0
    module = f"model.layers.{layer}"
    return LayerStatRecord(layer, module, n_nan, 0, -value, value, 0.0, value, 10 * value)


def _logits(step: int, chosen: int) -> LogitsRecord:
    candidates = tuple(
        Candidate(rank, 50 + rank, TEXTS[(chosen + rank) % len(TEXTS)], 9.0 - rank, *rest)
        for rank, rest in enumerate([(-0.1 - r, 9.0 - r, -0.1 - r) for r in range(5)])
    )
    return LogitsRecord(
        *(0.2 + step / 10, 1.0, 50, step % 2, -0.1 - step / 4, 0, 0, -8.0, 9.0, (1, 4, 9, 3)),
        candidates,
    )


def _arrays(step: int, pos: int) -> tuple[ArrayRecord, ...]:
    mass = np.zeros((LAYERS, HEADS, len(SEGMENTS)), np.float32)
    mass[:, :, 1] = 0.5
    mass[:, :, 3] = 0.3
    mass[:, :, 0] = 0.2
    entropy = np.full((LAYERS, HEADS), 1.5 + step / 10, np.float32)
    return (
        ArrayRecord("attention.mass", mass),
        ArrayRecord("attention.lse", entropy + 1),
        ArrayRecord("attention.entropy", entropy),
    )
