"""The model, the prompt and the way of measuring that all benchmarks share."""

from __future__ import annotations

import itertools
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from flexinspect.masks import mask_presets
from flexinspect.records.prompt import Prompt, PromptTokenIds, compose_prompt
from flexinspect_hooks.generation.decoding import Choice, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import SpecMaskSource

RESULTS = Path(__file__).parent / "results"
PROMPT, NEW = 256, 64


def random_llama(device: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """Return a random Llama with these sizes of its configuration, under SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


def bench_model(device: str = "cpu") -> Any:
    """Return the random Llama of the figures: 8 layers, hidden 512, 8 heads, 4 KV heads."""
    return random_llama(
        device,
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


def thin_model(device: str = "cpu") -> Any:
    """Return a random Llama of 28 layers whose steps are mostly Python: hidden 64, 4 heads."""
    return random_llama(
        device,
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=28,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def real_model(alias: str, device: str) -> Any:
    """Return a model of the registry at its real size, with random weights in bfloat16."""
    from flexinspect.inputs.model_names import resolve
    from flexinspect_hooks.loading.model_loader import load

    loaded = load(resolve(alias), device=device, dtype="bfloat16", weights="random")
    loaded.model.generation_config.eos_token_id = None
    return loaded.model


def bench_prompt(new_tokens: int = NEW) -> Prompt:
    """Return five isolated paraphrases of 47 tokens, BOS, separators and cue: 256 ids."""
    paraphrases = tuple(tuple(range(10 + 50 * i, 57 + 50 * i)) for i in range(5))
    pieces = PromptTokenIds((1,), (), paraphrases, (3,), tuple(range(400, 415)))
    prompt = compose_prompt(pieces, max_new_tokens=new_tokens)
    assert len(prompt.ids) == PROMPT
    return prompt


class Timing(Struct, frozen=True):
    """One generation: prefill and each decode step in seconds.

    `written` is how long after the last token the last step was in the trace, and `stated`
    what the run reports that capture took, as a share of the rest.
    """

    prefill: float
    steps: tuple[float, ...]
    written: float = 0.0
    stated: float = 0.0

    @property
    def decode(self) -> float:
        """Seconds of all decode steps together, so that a median hides no stall."""
        return sum(self.steps) + self.written

    @property
    def median(self) -> float:
        """Seconds of the decode step in the middle."""
        return statistics.median(self.steps)

    @property
    def total(self) -> float:
        """Seconds from the first forward until all is known and written."""
        return self.prefill + self.decode

    @classmethod
    def of(cls, started: float, stamps: Sequence[float]) -> Timing:
        """Make a timing from the start and the moment each token was known."""
        later = [b - a for a, b in itertools.pairwise(stamps)]
        return cls(stamps[0] - started, tuple(later))


def flex_source(prompt: Prompt, device: str, *, compiled: bool) -> SpecMaskSource:
    """Return the segment-isolation mask of a prompt."""
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    length = prompt.segments[-1].stop
    return SpecMaskSource(spec, length=length, device=torch.device(device), compiled=compiled)


def time_flex(
    model: Any,
    prompt: Prompt,
    *,
    compiled: bool = False,
    new_tokens: int = NEW,
    on_choice: Callable[[Choice], None] | None = None,
) -> Timing:
    """Time our generation under segment isolation."""
    stamps: list[float] = []

    def stamp(choice: Choice) -> None:
        if on_choice is not None:
            on_choice(choice)
        stamps.append(time.perf_counter())

    device = str(next(model.parameters()).device)
    source = flex_source(prompt, device, compiled=compiled)
    with FlexPatch(model, source, compiled=compiled):
        started = time.perf_counter()
        generate(model, prompt, max_new_tokens=new_tokens, on_choice=stamp)
    return Timing.of(started, stamps)


def ratio(top: Sequence[float], bottom: Sequence[float]) -> dict[str, float]:
    """Return the median of the ratios of neighbouring runs, with its quartiles."""
    each = sorted(a / b for a, b in zip(top, bottom, strict=True))
    quartiles = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return {
        "median": round(statistics.median(each), 4),
        "low": round(quartiles[0], 4),
        "high": round(quartiles[2], 4),
        "rounds": len(each),
    }


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row: wall clock and CPU of the whole process, in seconds.

    `stated` is what the measured code reports, or is observed, to take: a share of the rest.
    """

    wall: float
    cpu: float
    stated: float = 0.0


Run = Block | Timing


@dataclass(frozen=True, slots=True)
class Sandwich:
    """A block of a case, and the plain ones right before and after it."""

    case: Run
    before: Run
    after: Run

    def bottom(self, clock: str) -> float:
        """Return the mean of the plain ones by a clock: drift between the two cancels out."""
        return (float(getattr(self.before, clock)) + float(getattr(self.after, clock))) / 2

    def drift(self, clock: str) -> float:
        """Return by how much the plain ones differ, as a share of their mean."""
        apart = float(getattr(self.before, clock)) - float(getattr(self.after, clock))
        return abs(apart) / self.bottom(clock)


FEWEST = 3
"""Rounds that are run even where the time is over."""


def sandwiched(
    plain: Callable[[], Run], cases: Mapping[str, Callable[[], Run]], *, seconds: float
) -> dict[str, list[Sandwich]]:
    """Run the cases in turn, a plain block between any two, until `seconds` are over.

    The order is turned round each time. One round before that does not count.
    """
    found: dict[str, list[Sandwich]] = {name: [] for name in cases}
    plain()
    for run in cases.values():
        run()
    until, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < until or rounds < FEWEST:
        before = plain()
        for name in list(cases) if rounds % 2 else list(cases)[::-1]:
            case, after = cases[name](), plain()
            found[name].append(Sandwich(case, before, after))
            before = after
        rounds += 1
    return found


STEADY = 0.06
"""By how much the plain blocks of a sandwich may differ: past that, the machine changed its speed
in between, and the blocks are not comparable. The measured ratio has no part in this choice."""


def compared(blocks: Sequence[Sandwich], clock: str, steadied_by: str = "") -> dict[str, float]:
    """Return the median of a case's ratios by a clock, quartiles, how many, and how many are left
    out for an unsteady machine, as the clock `steadied_by` tells (the same one unless given).
    """
    steady = [one for one in blocks if one.drift(steadied_by or clock) <= STEADY]
    if len(steady) < FEWEST:
        steady = list(blocks)
    top = [float(getattr(one.case, clock)) for one in steady]
    found = ratio(top, [one.bottom(clock) for one in steady])
    return {**found, "left_out": len(blocks) - len(steady)}


def clocks(blocks: Sequence[Sandwich]) -> dict[str, Any]:
    """Return the ratios of a case by wall clock and by CPU, and the median of what it stated."""
    ratios: dict[str, Any] = {clock: compared(blocks, clock, "wall") for clock in ("wall", "cpu")}
    stated = statistics.median(one.case.stated for one in blocks)
    return {**ratios, "stated": round(1 + stated, 4)} if stated else ratios


def cell(found: Mapping[str, float]) -> str:
    """Return a ratio with its quartiles, as the tables have it."""
    return f"{found['median']:.3f} ({found['low']:.2f}–{found['high']:.2f})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def milliseconds(values: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return round(statistics.median(values) * 1e3, 3)


def cpu_of_commands() -> float:
    """Return the CPU time of all commands that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine(device: str) -> dict[str, Any]:
    """Describe the machine and the versions of the measurement."""
    import transformers

    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load": os.getloadavg(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def save(name: str, facts: dict[str, Any]) -> None:
    """Write a result as JSON and print it."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(facts, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text, flush=True)
