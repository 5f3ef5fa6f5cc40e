"""Make the demo model: tokenizer, training, measurement, files, page.

`python -m tools.demo_model` does it all; with `--evaluate-only` it measures the shipped model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from transformers import LlamaForCausalLM

from tools.demo_model.corpus import Composer, Sampler
from tools.demo_model.dataset import build_dataset, write_dataset
from tools.demo_model.evaluate import ModelUnderTest, main_rows, preset_rows
from tools.demo_model.facts import Fact, read_facts
from tools.demo_model.report import TrainingRecord, missed_bars, read_record, write_page
from tools.demo_model.tokenizer import load_tokenizer, train_tokenizer
from tools.demo_model.train import TrainingPlan, new_model, train

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "flexinspect" / "data" / "demo"
DOCS_PAGE = REPOSITORY / "docs" / "demo-model.md"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=TrainingPlan().steps)
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder of the model")
    parser.add_argument("--page", type=Path, default=DOCS_PAGE, help="page with the figures")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="measure the model in --out again"
    )
    return parser.parse_args(argv)


def make(
    options: argparse.Namespace, facts: Sequence[Fact]
) -> tuple[ModelUnderTest, TrainingRecord]:
    """Train a tokenizer and a model."""
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer(facts)
    model = new_model(tokenizer)
    plan = TrainingPlan(steps=options.steps)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(facts)} facts, {len(tokenizer)} tokens, {n_parameters:,} parameters")
    train(model, Sampler(facts, Composer(tokenizer), options.seed), plan)
    record = TrainingRecord(
        seed=options.seed,
        steps=plan.steps,
        threads=options.threads,
        seconds=round(time.perf_counter() - started, 1),
        parameters=n_parameters,
        vocabulary=len(tokenizer),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    return ModelUnderTest(model, tokenizer), record


def load(folder: Path) -> tuple[ModelUnderTest, TrainingRecord]:
    """Load the model in `folder` and the record of its training."""
    model = LlamaForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="sdpa"
    )
    return ModelUnderTest(model, load_tokenizer(folder)), read_record(folder)


def save(
    folder: Path, model: ModelUnderTest, record: TrainingRecord, facts: Sequence[Fact]
) -> None:
    """Write everything that is shipped, aside first, so that an interruption damages nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as name:
        aside = Path(name)
        model.model.save_pretrained(name)
        model.tokenizer.save_pretrained(name)
        record.write(aside)
        write_dataset(aside / "questions.jsonl", build_dataset(facts, model, record.seed))
        for file in aside.iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


def run(options: argparse.Namespace) -> int:
    """Do what the command line asks for and return the exit code."""
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    facts = read_facts()
    model, record = load(options.out) if options.evaluate_only else make(options, facts)
    rows = main_rows(model, facts)
    missed = missed_bars(rows)
    for sentence in missed:
        print(f"bar missed: {sentence}", file=sys.stderr)
    if missed and not options.evaluate_only:
        print("Nothing was written: the model is below the bars.", file=sys.stderr)
        return 1
    presets = preset_rows(model, facts)
    if not options.evaluate_only:
        save(options.out, model, record, facts)
    n_bytes = sum(file.stat().st_size for file in options.out.iterdir())
    n_countries = len({fact.country for fact in facts})
    write_page(options.page, record, rows, presets, n_countries, n_bytes)
    return 1 if missed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and on Ctrl-C leave every file as it was."""
    try:
        return run(arguments(argv))
    except KeyboardInterrupt:
        print("\nStopped; the shipped files are as they were.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
