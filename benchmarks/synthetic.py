"""Big traces without a model: `python -m benchmarks.synthetic long|wide FILE`.

They go through the real `TraceWriter` and look like a run at level advanced of a Llama with 8
layers, 8 heads and 4 KV heads under uncompiled FlexAttention, so that readers, panels and
screens can be tried at sizes that a model takes hours to reach. The numbers are made up, but fit:
probabilities fall, masses add up to 1, every row of calls names a mask that is there. The same
arguments give the same records.

`long`: one generation of 100 000 steps after a prompt of five paraphrases of 50 tokens. Every step
has its token, logits with 10 candidates and a histogram, 8 calls, 8 layer statistics, memory, and
a mask of its own with cells and block tables. Thinner than a real one: attention (mass, lse,
entropy) is there at every `ATTENTION_EVERY`th step and at the last `ATTENTION_LAST` only, 3.8 kB
less per step. A few steps at 70 % have NaN in layer 5, with findings.

`wide`: a prefill of 32 768 tokens (eight isolated paraphrases) with its whole mask, 1 GiB of bools.
Of more than `MOST_CELLS` cells it has the block tables only, as in a recorded run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect import __version__
from flexinspect.masks import key_blocks, mask_presets
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import (
    Prompt,
    PromptTokenIds,
    close_generated_segment,
    compose_prompt,
)
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

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 8, 4, 64, 32_000
GROUP = 250
"""Steps that are written in one transaction."""

MOST_CELLS = 1 << 30
"""Cells of a mask that is made; 131 072 tokens would take 16 GiB."""

ATTENTION_EVERY, ATTENTION_LAST = 5, 1_000
STARTED_AT, STEP_MS = 1_700_000_000.0, 20.0
N_CANDIDATES, NONFINITE_LAYER, N_NONFINITE = 10, 5, 5

_TEXT = """
the of and to in is that for it was on are as with they be at one have this from or by hot word but
what some we can out other were all there when up use your how said an each she which do their time
if will way about many then them write would like so these her long make thing see him two has look
more day could go come did number sound no most people my over know water than call first who may
down side been now find head stand own page should country found answer school grow study still
"""

WORDS = tuple(_TEXT.split())
"""The vocabulary: a token is one of these with a blank before it."""

Progress = Callable[[int, int], None]


def long_trace(path: str | Path, steps: int = 100_000, progress: Progress | None = None) -> Path:
    """Write one long generation to `path`, replacing what is there; see the module."""
    prompt = _prompt([50] * 5, steps)
    return _write(_Made(prompt, steps, thin=True), Path(path), progress)


def wide_trace(
    path: str | Path, tokens: int = 32_768, steps: int = 64, progress: Progress | None = None
) -> Path:
    """Write a prefill of `tokens` tokens and a few decode steps to `path`; see the module.

    Takes `tokens` squared bytes of memory, at most `MOST_CELLS`, for the mask and an eighth of that
    for its bits.
    """
    rest = 1 + 8 + 3  # BOS, separators, cue
    each, more = divmod(tokens - rest, 8)
    prompt = _prompt([each + (number < more) for number in range(8)], steps)
    return _write(_Made(prompt, steps, thin=False), Path(path), progress)


def _prompt(lengths: list[int], steps: int) -> Prompt:
    starts = np.cumsum([0, *lengths]).tolist()
    paraphrases = tuple(
        tuple(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)
    )
    return compose_prompt(
        PromptTokenIds((1,), (), paraphrases, (2,), (3, 4, 5)), max_new_tokens=steps
    )


def _write(made: _Made, path: Path, progress: Progress | None) -> Path:
    with TraceWriter.create(path, _manifest(made), overwrite=True) as writer:
        writer.write_event(EventRecord("phase", "generating", STARTED_AT))
        writer.begin_generation(made.generation())
        for start in range(0, made.n_steps, GROUP):
            stop = min(start + GROUP, made.n_steps)
            writer.write_steps(list(made.steps(start, stop)))
            if progress is not None:
                progress(stop, made.n_steps)
        writer.end_generation(made.end())
    return path


@dataclass(frozen=True, slots=True)
class _Made:
    """A generation that never ran: its records are made on request."""

    prompt: Prompt
    n_steps: int
    thin: bool

    @property
    def n_prompt(self) -> int:
        return len(self.prompt.ids)

    def generation(self) -> GenerationRecord:
        """Return the prompt, with words for its tokens."""
        segments = self.prompt.segments
        inside = np.repeat(range(len(segments) - 1), [len(one) for one in segments[:-1]]).tolist()
        tokens = [
            _token(pos, token_id % len(WORDS), self.prompt.position_ids[pos], inside[pos])
            for pos, token_id in enumerate(self.prompt.ids)
        ]
        spec = self._spec()
        declared = {"preset": spec.name, "separators": "attached", "starts": list(spec.starts)}
        declared |= {"head": list(spec.prefix_stops), "low": list(spec.local_starts)}
        about = ("synthetic/0", spec.name, "contiguous", segments, tuple(tokens), (WORDS[0],))
        return GenerationRecord(0, *about, declared, STARTED_AT)

    def end(self) -> GenerationEnd:
        """Return the end, with the whole text."""
        answer = "".join(_text(word) for word in _words(0, self.n_steps).tolist())
        segments = close_generated_segment(self.prompt.segments, self.n_prompt + self.n_steps)
        ended = STARTED_AT + self.n_steps * STEP_MS / 1e3
        return GenerationEnd(0, "finished", answer, segments, "length", ended)

    def steps(self, start: int, stop: int) -> Iterator[StepRecord]:
        """Yield the steps `start <= step < stop`."""
        numbers = _Numbers.of(start, stop)
        for index, step in enumerate(range(start, stop)):
            yield self._step(step, numbers, index)

    def _step(self, step: int, numbers: _Numbers, index: int) -> StepRecord:
        before = self.n_prompt + step - 1 if step else 0
        after = self.n_prompt + step
        mask = self._decode_mask(after) if step else self._prefill_mask()
        segment, position = len(self.prompt.segments) - 1, self.prompt.next_position(step)
        token = _token(after, numbers.words[index], position, segment, step)
        nonfinite = self._is_nonfinite(step)
        return StepRecord(
            *(0, step, "decode" if step else "prefill", after - before, before, after),
            *(STARTED_AT + step * STEP_MS / 1e3, numbers.wall_ms[index], 0.4),
            logits=numbers.logits(index),
            tokens=(token,),
            calls=tuple(
                _call(layer, mask, numbers.lse_errors[index] * (1 + layer))
                for layer in range(LAYERS)
            ),
            layer_stats=tuple(
                _stat(layer, numbers.norms[index], nonfinite=nonfinite and layer >= NONFINITE_LAYER)
                for layer in range(LAYERS)
            ),
            memory=_memory(after),
            masks=(mask,),
            arrays=self._arrays(step),
            findings=(_finding(step),) if nonfinite else (),
        )

    def _is_nonfinite(self, step: int) -> bool:
        first = self.n_steps * 7 // 10
        return self.thin and first <= step < first + N_NONFINITE and step > 0

    def _arrays(self, step: int) -> tuple[ArrayRecord, ...]:
        if self.thin and step % ATTENTION_EVERY and step < self.n_steps - ATTENTION_LAST:
            return ()
        return _attention(len(self.prompt.segments), step % 64)

    def _spec(self) -> mask_presets.MaskSpec:
        return mask_presets.preset("segment-isolation", self.prompt.segments)

    def _prefill_mask(self) -> MaskRecord:
        spec, n = self._spec(), self.n_prompt
        name = "flexinspect_hooks.generation.mask_source.arithmetic_mask_mod.<locals>.mask_mod"
        if n * n > MOST_CELLS:
            tables = key_blocks.block_tables(spec, n, n)
            return _mask(name, n, n, 0, None, tables.partial[None], tables.full[None])
        cells = np.empty((1, n, n), np.bool_)
        for start, stop in key_blocks.row_chunks(n):
            cells[0, start:stop] = spec.dense(stop - start, n, q_offset=start)
        rows = (cells[0, start:stop] for start, stop in key_blocks.row_chunks(n))
        tables = key_blocks.stack_block_rows(rows)
        return _mask(name, n, n, 0, cells, tables.partial[None], tables.full[None])

    def _decode_mask(self, n_kv: int) -> MaskRecord:
        cells = np.ones((1, 1, n_kv), np.bool_)
        partial = np.ones((1, 1, -(-n_kv // key_blocks.BLOCK_SIZE)), np.bool_)
        name = "flexinspect_hooks.generation.mask_source._causal_mask_mod.<locals>.mask_mod"
        return _mask(name, 1, n_kv, n_kv - 1, cells, partial, None)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of steps in a row, drawn together: one entry per step in each list."""

    words: list[int]
    ranks: list[int]
    entropy: list[float]
    logprobs: list[list[float]]
    histograms: list[list[int]]
    wall_ms: list[float]
    lse_errors: list[float]
    norms: list[float]

    @classmethod
    def of(cls, start: int, stop: int) -> _Numbers:
        count = stop - start
        rng = np.random.default_rng((1, start))
        best = rng.beta(4, 1.5, count).clip(0.2, 0.999)
        falling = 0.4 * 0.6 ** np.arange(N_CANDIDATES - 1)
        probs: npt.NDArray[np.float64] = np.column_stack([best, (1 - best)[:, None] * falling])
        logprobs = np.log(probs)
        shape = np.exp(-(((np.arange(64) - 20) / 9.0) ** 2))
        histograms = rng.poisson(shape / shape.sum() * VOCABULARY, (count, 64))
        histograms[:, 20] += VOCABULARY - histograms.sum(axis=1)
        return cls(
            _words(start, stop).tolist(),
            (rng.random(count) < 0.03).astype(int).tolist(),
            (-(probs * logprobs).sum(axis=1)).tolist(),
            logprobs.tolist(),
            histograms.tolist(),
            rng.gamma(40, STEP_MS / 40, count).tolist(),
            (rng.random(count) * 1e-5).tolist(),
            rng.normal(100, 5, count).tolist(),
        )

    def logits(self, index: int) -> LogitsRecord:
        """Return the distribution of a step; the chosen token is at its rank."""
        logprobs, rank, word = self.logprobs[index], self.ranks[index], self.words[index]
        candidates = tuple(
            _candidate(number, _nth_word(word, number - rank), logprob)
            for number, logprob in enumerate(logprobs)
        )
        margin = logprobs[0] - logprobs[1]
        return LogitsRecord(
            *(self.entropy[index], margin, _token_id(word), rank, logprobs[rank], 0, 0),
            *(-10.0, 20.0, tuple(self.histograms[index]), candidates),
        )


def _words(start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return which word each step chose: scattered, and the same in any order of requests."""
    steps = np.arange(start, stop)
    words: npt.NDArray[np.int64] = (steps * 2654435761 >> 7) % len(WORDS)
    return words


def _nth_word(word: int, number: int) -> int:
    return (word + 37 * number) % len(WORDS)


def _token_id(word: int) -> int:
    return 10 + word


def _text(word: int) -> str:
    return f" {WORDS[word]}"


def _token(
    pos: int, word: int, position_id: int, segment: int, step: int | None = None
) -> TokenRecord:
    name, text = f"Ġ{WORDS[word]}", _text(word)
    return TokenRecord(pos, _token_id(word), name, text, position_id, segment, False, step)


def _candidate(rank: int, word: int, logprob: float) -> Candidate:
    logit = logprob + 18.0
    return Candidate(rank, _token_id(word), _text(word), logit, logprob, logit, logprob)


def _mask(
    mask_mod: str,
    q_len: int,
    kv_len: int,
    q_offset: int,
    cells: npt.NDArray[np.bool_] | None,
    partial: npt.NDArray[np.bool_],
    full: npt.NDArray[np.bool_] | None,
) -> MaskRecord:
    name = hashlib.blake2b(f"{mask_mod} {q_len} {kv_len}".encode(), digest_size=8).hexdigest()
    return MaskRecord(
        *(
            name,
            "block",
            1,
            1,
            q_len,
            kv_len,
            q_offset,
            0,
            key_blocks.BLOCK_SIZE,
            key_blocks.BLOCK_SIZE,
        ),
        *(mask_mod, "maskmods.py:55", False),
        cells=cells,
        partial=partial,
        full=full,
    )


def _call(layer: int, mask: MaskRecord, lse_error: float) -> CallRecord:
    return CallRecord(
        *(layer, "flex uncompiled", "flexinspect", mask.fingerprint, 1, HEADS, KV_HEADS),
        *(mask.q_len, mask.kv_len, HEAD_DIM, "float32", HEAD_DIM**-0.5, lse_error, "lse"),
    )


def _stat(layer: int, norm: float, *, nonfinite: bool) -> LayerStatRecord:
    name, std = f"model.layers.{layer}", 1.0 + layer
    if nonfinite:
        nan = float("nan")
        return LayerStatRecord(layer, name, 3, 0, nan, nan, nan, nan, nan)
    grown = norm * (1 + layer)
    return LayerStatRecord(layer, name, 0, 0, -4 * std, 4 * std, 0.01 * layer, std, grown)


def _memory(kv_len: int) -> MemoryRecord:
    cache = kv_len * LAYERS * KV_HEADS * HEAD_DIM * 2 * 4
    return MemoryRecord(900_000_000 + cache, 170_000_000, cache)


def _finding(step: int) -> Finding:
    sentence = (
        f"Layer {NONFINITE_LAYER} puts out 3 NaN at step {step}; the layers before it have none."
    )
    evidence = {"n_nan": 3, "module": f"model.layers.{NONFINITE_LAYER}"}
    where = (0, 0, step, NONFINITE_LAYER, None, ())
    return Finding("numbers.nan", Severity.ERROR, sentence, *where, evidence)


@cache
def _attention(n_segments: int, which: int) -> tuple[ArrayRecord, ...]:
    """Return attention of a step; there are 64 of them, used in turn."""
    rng = np.random.default_rng((2, n_segments, which))
    mass = rng.gamma(0.4, 1.0, (LAYERS, HEADS, n_segments)).astype(np.float32) + 1e-6
    mass /= mass.sum(axis=2, keepdims=True)
    entropy = -(mass * np.log(mass)).sum(axis=2)
    lse = rng.normal(6, 1, (LAYERS, HEADS)).astype(np.float32)
    streams = {"attention.mass": mass, "attention.lse": lse, "attention.entropy": entropy}
    return tuple(ArrayRecord(name, array) for name, array in streams.items())


def _manifest(made: _Made) -> dict[str, Any]:
    names = {"name": "synthetic", "place": "", "class": "LlamaForCausalLM", "weights": "none"}
    sizes = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "hidden": HEADS * HEAD_DIM}
    more = {"parameters": 42_000_000, "vocabulary": VOCABULARY, "tokenizer": True}
    where = {"device": "cpu", "dtype": "float32", "weights_fingerprint": "0" * 32}
    job = {"model": "synthetic", "mask": "segment-isolation", "positions": "contiguous"}
    total = made.n_steps * STEP_MS / 1e3
    cost = {"capture_s": 0.02 * total, "writer_s": 0.03 * total, "total_s": total}
    return {
        "argv": sys.argv,
        "compiled": False,
        "cost": {**cost, "ratio": 0.02, "steps": made.n_steps},
        "cwd": str(Path.cwd()),
        "flexinspect": __version__,
        "host": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "job": {**job, "level": "advanced", "seed": 0, "max_new_tokens": made.n_steps},
        "level": "advanced",
        "model": {**names, **sizes, **more, **where},
        "pid": os.getpid(),
        "rules": [],
        "seed": 0,
        "started_at": STARTED_AT,
        "synthetic": True,
        "threads": 1,
        "versions": {"python": platform.python_version(), "flexinspect": __version__},
    }


def main() -> None:
    """Write one of the traces and say how long it took and how large it is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", choices=("long", "wide"))
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--steps", type=int, help="decode steps (long: 100000, wide: 64)")
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt of wide")
    args = parser.parse_args()
    started = time.perf_counter()
    if args.kind == "long":
        long_trace(args.file, args.steps or 100_000, _show)
    else:
        wide_trace(args.file, args.tokens, args.steps or 64, _show)
    took, size = time.perf_counter() - started, args.file.stat().st_size
    print(f"{args.file}: {size / 1e6:.1f} MB in {took:.1f} s")


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} steps", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
