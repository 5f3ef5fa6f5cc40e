"""The page docs/demo-model.md and the bars that a model must pass to be shipped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.demo_model.evaluate import SENTENCE_ROW, Row
from tools.demo_model.templates import HELD_OUT, RELATIONS, SEEN

PAGE = Path(__file__).with_name("page.md")
SEEN_BAR, HELD_OUT_BAR, GAIN_BAR, SENTENCE_BAR = 97.0, 70.0, 10.0, 95.0


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What the shipped model was made with, kept next to it as training.json."""

    seed: int
    steps: int
    threads: int
    seconds: float
    parameters: int
    vocabulary: int
    torch: str
    transformers: str

    def write(self, folder: Path) -> None:
        """Write the record into the model's folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / "training.json").write_text(text, encoding="utf-8")


def read_record(folder: Path) -> TrainingRecord:
    """Read the record that `TrainingRecord.write` left."""
    return TrainingRecord(**json.loads((folder / "training.json").read_text(encoding="utf-8")))


def missed_bars(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each bar that the table does not reach."""
    percent = {row.name: row.score.percent for row in rows}
    seen, lone = percent["seen wording, alone"], percent["held-out wording, alone"]
    gain = percent["five held-out wordings, fused"] - lone
    sentences = percent[SENTENCE_ROW]
    checks = (
        (seen >= SEEN_BAR, f"seen wordings alone: {seen:.1f} %, the bar is {SEEN_BAR} %"),
        (lone >= HELD_OUT_BAR, f"held-out wordings alone: {lone:.1f} %, not {HELD_OUT_BAR} %"),
        (gain >= GAIN_BAR, f"fusing gains {gain:.1f} points, the bar is {GAIN_BAR}"),
        (sentences >= SENTENCE_BAR, f"in a sentence: {sentences:.1f} %, not {SENTENCE_BAR} %"),
    )
    return [sentence for passed, sentence in checks if not passed]


def table(rows: Sequence[Row], first: str) -> str:
    """Return the rows as a Markdown table, one column per relation."""
    names = [relation.replace("_", " ") for relation in RELATIONS]
    head = f"| {first} | prompts | all | " + " | ".join(names) + " |"
    rule = "|---|" + "---:|" * (len(names) + 2)
    return "\n".join([head, rule, *(_table_row(row) for row in rows)])


def _table_row(row: Row) -> str:
    cells = [f"{row.by_relation[relation].percent:.1f}" for relation in RELATIONS]
    score = row.score
    return (
        f"| {row.name} | {score.n_questions} | **{score.percent:.1f}** | "
        + " | ".join(cells)
        + " |"
    )


def write_page(
    path: Path,
    record: TrainingRecord,
    main: Sequence[Row],
    presets: Sequence[Row],
    n_countries: int,
    n_bytes: int,
) -> None:
    """Fill the figures into page.md and write the page."""
    relation = RELATIONS[0]
    text = PAGE.read_text(encoding="utf-8").format(
        record=record,
        minutes=record.seconds / 60,
        millions=record.parameters / 1e6,
        megabytes=n_bytes / 1e6,
        countries=n_countries,
        facts=n_countries * len(RELATIONS),
        seen=len(SEEN[relation]),
        held_out=len(HELD_OUT[relation]),
        main_table=table(main, "prompt"),
        preset_table=table(presets, "preset, positions"),
    )
    path.write_text(text, encoding="utf-8")
