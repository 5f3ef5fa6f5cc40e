"""What stands for each error: the findings that name it, those of its class, and declarations."""

from __future__ import annotations

from msgspec import Struct

from flexinspect.records.job import Declaration


class Named(Struct, frozen=True):
    """A finding that names an error: its id ("" for any), and words of its sentence."""

    id: str
    words: tuple[str, ...] = ()


class Case(Struct, frozen=True):
    """An error: what was planted, what names it, what hints at it, and the public thread.

    Notes count only where the numbers are right, such as for a habit that is slow.
    """

    planted: str
    named: tuple[Named, ...]
    hints: tuple[str, ...] = ()
    declaration: Declaration = Declaration()
    thread: str = ""
    notes_count: bool = False


_QUESTIONS = ("Which city is the capital of France?", "What is the money of Japan called?")
_SPANS = Declaration(((1, 8, "question 1"), (8, 14, "question 2")), "segment-isolation")
_TEXTS = Declaration((*_QUESTIONS, ("Answer:", "cue")), "causal")

REPRODUCED = "audit.reproduced"
CASES: dict[str, Case] = {
    "X01": Case(
        "the prompt builder cuts the cue",
        (Named("segments.not-found", ("'cue'",)),),
        ("segments.not-found",),
        _TEXTS,
    ),
    "X02": Case(
        "a patched forward is bound twice; the plain model goes on",
        (Named("mask.not-applied", ("TypeError",)),),
        ("mask.not-applied",),
        _SPANS,
    ),
    "X04": Case(
        "RoPE is skipped by a `hasattr` guard in a patched forward",
        (Named(REPRODUCED, ("Layer 0", "without RoPE")),),
        (REPRODUCED, "audit.unexplained"),
    ),
    "X07": Case(
        "a `BlockMask` reaches eager attention",
        (Named("run.exception", ("BlockMask", "'eager'")), Named("", ("BlockMask", "layer 0"))),
        ("run.exception", "path.kernel-failed"),
    ),
    "X09": Case(
        "`generate` gets a 4D mask",
        (Named("run.exception", ("(1, 1, 17, 17)", "mask_of_four_dimensions")),),
        ("run.exception",),
    ),
    "X10": Case(
        "`_adjust` of a BlockMask raises",
        (Named("mask.rule-raised", ("IndexError", "document")),),
        ("mask.rule-raised", "run.exception", "path.kernel-failed"),
    ),
    "X14": Case(
        "asking for weights drops the mask (softmax by hand)",
        (Named(REPRODUCED, ("Layer 0", "causal")), Named("mask.not-applied", ("weights",))),
        (REPRODUCED, "audit.unexplained", "mask.not-applied"),
        _SPANS,
    ),
    "X15": Case(
        "a cache of masks survives an exception",
        (Named("mask.other-prompt", ("prompt of generation 0",)),),
        ("segments.drift",),
    ),
    "X19": Case(
        "attention sinks are built as a score_mod and not applied",
        (Named(REPRODUCED, ("Layer 0", "without the attention sinks")),),
        (REPRODUCED, "audit.unexplained"),
    ),
    "X22": Case(
        "the rule of a paged cache compares positions with slots",
        (Named(REPRODUCED, ("Layer 0", "slots", "positions")),),
        (REPRODUCED, "audit.unexplained"),
    ),
    "X23": Case(
        "a hook of a compiled model never fires",
        (Named("graphs.silent-hook", ("steer", "model.layers.1.mlp")),),
        ("graphs.silent-hook",),
    ),
    "X24": Case(
        "`ROWS_GUARANTEED_SAFE` with rows that are empty",
        (Named("mask.option-promise", ("ROWS_GUARANTEED_SAFE", "5 rows")),),
        ("mask.option-promise",),
    ),
    "N01": Case(
        "rejected drafts stay in the cache",
        (Named(REPRODUCED, ("Step 2", "rejected proposals")),),
        (REPRODUCED, "audit.unexplained"),
        thread="ml-explore/mlx-lm#1109",
    ),
    "N02": Case(
        "beam search by hand, cache not reordered",
        (Named("", ("another beam",)),),
        (REPRODUCED, "audit.unexplained"),
        thread="huggingface/transformers#46612",
    ),
    "N03": Case(
        "the cache is thinned, and positions follow its length",
        (Named(REPRODUCED, ("Layer 0", "position ids", "15")),),
        (REPRODUCED, "audit.unexplained", "cache.lost"),
        thread="huggingface/transformers#47597",
    ),
    "N05": Case(
        "sampling comes from the checkpoint's generation config",
        (Named("generate.sampling-by-config", ("do_sample=True",)),),
        ("generate.sampling-by-config",),
        thread="huggingface/lighteval#559",
        notes_count=True,  # the program does not say that it means greedy decoding
    ),
    "N06": Case(
        "a batch is padded with the EOS, its mask is not passed",
        (
            Named("mask.padding-as-text", ("9 padding tokens",)),
            Named(REPRODUCED, ("9 padding tokens",)),
        ),
        ("mask.batch-padding",),
        thread="QwenLM/Qwen#63",
    ),
    "N07": Case(
        "the soft cap of the scores is not applied",
        (Named(REPRODUCED, ("Layer 0", "without the soft cap")),),
        (REPRODUCED, "audit.unexplained"),
        thread="vllm-project/vllm-metal#665",
    ),
    "N09": Case(
        "one cache of a prefix serves two questions",
        (Named("cache.shared", ("another question", "position 10")),),
        ("cache.shared",),
        thread="huggingface/transformers#37078",
    ),
    "N10": Case(
        "training mode is left on, with attention dropout",
        (Named("audit.training-mode", ("dropout (0.2)",)),),
        ("audit.unexplained",),
        thread="karpathy/nanoGPT#749",
    ),
    "N11": Case(
        "the output head is not tied and newly initialised",
        (Named("weights.newly-initialised", ("lm_head",)),),
        ("text.flat",),
        thread="huggingface/transformers#43429",
    ),
    "N12": Case(
        "another `eos_token_id`: the text runs on behind the EOS",
        (Named("generate.eos-passed-over", ("<eos>", "step 2")),),
        ("generate.eos-passed-over",),
        thread="huggingface/lighteval#1279",
    ),
    "N14": Case(
        "a distance bias in a score_mod, without the offset of the decode row",
        (Named(REPRODUCED, ("step 1", "score_mod of row 0")),),
        (REPRODUCED, "audit.unexplained"),
        thread="keras-team/keras-hub#2862",
    ),
    "N16": Case(
        "rules made in a loop all see the last window",
        (Named("mask.late-binding", ("`window`", "32")),),
        ("mask.late-binding",),
    ),
}
"""The cases of the second list of bugs, by its numbers."""

NOTHING = Declaration()
CORRECT: dict[str, Declaration] = {
    **dict.fromkeys(
        (
            *("windows-by-layer", "windows-of-the-architecture", "paged-cache"),
            *("announced-eviction", "dropout-in-training"),
        ),
        NOTHING,
    ),
    "isolated-separators": Declaration(
        ((1, 8, "question 1"), (8, 13, "question 2"), (13, 14, "separator"), (14, 17, "cue")),
        "segment-isolation",
        "isolated",
    ),
    "isolated-segments": _SPANS,
    "two-prompts": _TEXTS,
    "two-masked-prompts": Declaration(_QUESTIONS, "segment-isolation"),
}
"""Programs without an error, with what is declared of them."""
