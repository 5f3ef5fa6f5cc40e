"""The catalogue of broken runs (`flexinspect museum`): the fault of each, a question, its answer.

The programs themselves are in `flexinspect_hooks.broken_runs`, a function for each name (with "_"
for "-"); nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexinspect.core import __version__
from flexinspect.core.environment import user_folder
from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean


@dataclass(frozen=True, slots=True)
class BrokenRun:
    """A run with one fault, and its tutorial.

    A correct run reports at least one of the finding ids `expected`; `panel` and `step` show the
    answer. `case` names the public report or code that it imitates.
    """

    name: str
    title: str
    case: str
    story: str
    question: str
    answer: str
    panel: str
    expected: tuple[str, ...]
    step: int = 0

    def tutorial_lines(self) -> list[str]:
        """Return the paragraphs of the tutorial."""
        return [
            self.title,
            self.story,
            f"Question: {self.question}",
            f"Where to look: the {self.panel} panel, step {self.step}. {self.answer}",
            f"Imitates: {self.case}.",
        ]


BROKEN_RUNS = (
    BrokenRun(
        "spans-without-bos",
        "The spans are one token off",
        "the BOS trouble of OpenRLHF/OpenRLHF#393 and deepseek-ai/DeepSeek-R1#151",
        "Three wordings of a question are kept apart by a mask of segments. The segments were "
        "counted in the pieces, each encoded by itself; the joined prompt begins with a BOS that "
        "nobody counted. Text comes out, a little worse than it should be, and nothing fails.",
        "Which row is on the wrong side of a border, and what does it attend to?",
        "Flip the mask to the difference: at each border one row is lost and one leaks.",
        "mask",
        (
            *("segments.shifted", "mask.leak", "mask.lost", "mask.not-applied"),
            "decode.prompt-row-generated",
        ),
    ),
    BrokenRun(
        "orphan-separators",
        "Line breaks that belong to no segment",
        "masks built from spans alone, as in GuoYibo233/self-ensemble (generate_flex_attention.py)",
        "A token attends to its own wording only. The BOS and the line breaks between the wordings "
        "belong to no wording, so their rows are empty; the answer attends to them nevertheless.",
        "Which rows attend to nothing, and which rows attend to them?",
        "The empty rows are marked at the edge; the finding counts the rows that attend to them.",
        "mask",
        ("mask.empty-row",),
    ),
    BrokenRun(
        "missing-eos",
        "Three documents, one mask",
        "pytorch/torchtitan#3130 and pytorch/torchtitan#1144",
        "The mask separates packed documents by the EOS tokens between them. The tokenizer added "
        "none, so all documents are one and attend to each other. The loss looks fine.",
        "How many pieces does the mask have, and how many were packed?",
        "The mask is one triangle; three were declared.",
        "mask",
        ("mask.merged", "mask.not-applied", "mask.leak"),
    ),
    BrokenRun(
        "placeholder-mask",
        "FlexAttention without fallback",
        "GuoYibo233/self-ensemble (flex_attention_generate.py at ac7efa7)",
        "The log says that FlexAttention ran, without fallback, in all layers. So it did: with the "
        "placeholder that was to be replaced by the mask later. It is true everywhere.",
        "Does any row attend to later keys?",
        "The mask is open above the diagonal too.",
        "mask",
        ("mask.future", "mask.not-applied", "mask.leak"),
    ),
    BrokenRun(
        "silent-fallback",
        "One layer of four",
        "GuoYibo233/self-ensemble (a try/except around flex; layer 26 in commit 1edb851)",
        "In one layer the call of FlexAttention raises, because its mask is on another device. An "
        "except clause runs plain causal attention there. Isolation seems to work, mostly.",
        "Which layer ran another path than the others, and which exception did it suppress?",
        "One row in the strip of layers has another colour; its exception is shown next to it.",
        "path",
        ("path.fallback", "path.swallowed"),
    ),
    BrokenRun(
        "patch-behind-an-if",
        "A patch that is never applied",
        "GuoYibo233/self-ensemble (myriadlama_custom_attention_generate.py); SDPA masks are None",
        "A decoder layer is patched to close cells in its mask, if that is a 4D tensor. Under SDPA "
        "a prompt without padding has no mask at all, so the patch has nothing to close.",
        "What mask did layer 0 receive?",
        "It received none, on a path that is causal by default; the declared structure is missing.",
        "mask",
        ("mask.not-applied", "mask.leak"),
    ),
    BrokenRun(
        "no-mask-function",
        "A name without a mask function",
        "huggingface/transformers#46132 and huggingface/transformers PR#45811",
        "An attention function is registered under a new name. Transformers builds masks by name, "
        "has none for this one, and passes None: with FlexAttention that means no mask.",
        "Which keys can the first token attend to?",
        "All of them: the layers received no mask, and every key is visible.",
        "mask",
        ("mask.none", "mask.future"),
    ),
    BrokenRun(
        "bool-mask-added",
        "True is one",
        "huggingface/transformers#29525 and huggingface/transformers#32195",
        "A boolean 4D mask is correct with SDPA. Eager attention adds it to the scores: visible "
        "cells get 1 more, and nothing is masked.",
        "Which cells does the boolean mask hide here?",
        "None: the received mask is boolean, and the executed mask is open everywhere.",
        "mask",
        ("mask.bool-added",),
    ),
    BrokenRun(
        "leak-through-separators",
        "Isolated in every picture",
        "GuoYibo233/self-ensemble (myriadlama_custom_attention_generate.py: group 0)",
        "No wording attends to another one. But the line breaks between them attend to everything "
        "before them, and every row attends to the line breaks: one layer later, it has leaked.",
        "From which layer on does the first wording reach the third, and through which rows?",
        "Follow the rows of the line breaks, which connect both wordings.",
        "mask",
        ("reach.leak",),
    ),
    BrokenRun(
        "decode-without-offset",
        "The first token was right",
        "NVIDIA-NeMo/Megatron-Bridge PR#5259 and meta-pytorch/attention-gym#46",
        "The first token is right and all later ones are wrong. In a decode step the only row has "
        "index 0, so a causal mask_mod leaves it only the first key.",
        "How many keys does the row of step 1 attend to, and how many does the last row of step 0?",
        "The last row of the prompt attends to all keys, the row of step 1 to one.",
        "mask",
        ("decode.no-offset",),
        1,
    ),
    BrokenRun(
        "empty-cache-slots",
        "Attention to nothing",
        "meta-pytorch/gpt-fast#233",
        "A static cache has more slots than tokens, and the mask of a decode row is open over all "
        "that were allocated. An empty slot scores 0, which softmax treats like any other score.",
        "How much attention of a step goes to empty slots?",
        "More keys are visible than are filled; the finding has their share of the attention.",
        "mask",
        ("cache.empty-slots",),
        1,
    ),
    BrokenRun(
        "lost-cache",
        "A cache that stays empty",
        "adapter-hub/adapters#824 and unslothai/unsloth-zoo#281",
        "A logger around one layer's attention passes the cache under the name that it had years "
        "ago, and a catch-all keyword absorbs the new one. That layer forgets the prompt.",
        "How many keys does each layer's cache hold after the prompt?",
        "Layer 1 holds none; in step 1 it attends to one key, where others attend to all.",
        "path",
        ("cache.empty-layer", "cache.lost"),
        1,
    ),
    BrokenRun(
        "no-cache",
        "Everything is recomputed, in every layer",
        "GuoYibo233/self-ensemble (generate_flex_attention.py: a loop without a cache)",
        "Each step runs the whole sequence again, and each layer builds the same mask as the layer "
        "before. The answer is right, and its cost grows with the square of its length.",
        "How many masks were built for one token, and how many of them differ?",
        "The query length grows by one at each step, and all layers have one mask fingerprint.",
        "path",
        ("path.needless-builds", "cache.not-used"),
        1,
    ),
    BrokenRun(
        "mask-one-short",
        "A mask for 58, and 59 keys",
        "unslothai/unsloth#5309 and meta-pytorch/attention-gym#122",
        "The mask of a decode step is built before the cache has grown. FlexAttention refuses it "
        "and says why; a try/except around the call then runs attention without a mask.",
        "For how many keys was the mask made, and how many were there?",
        "Every layer of every decode step fell back; the suppressed exception has the lengths.",
        "path",
        ("lengths.mask-kv", "path.fallback", "path.swallowed", "path.bypass"),
        1,
    ),
    BrokenRun(
        "graph-every-step",
        "A compile for each token",
        "meta-pytorch/attention-gym#15",
        "The mask_mod of each decode step is a new code object, as in a notebook cell that runs "
        "again. No compiled graph fits it, so each token triggers a compilation.",
        "How many graphs were compiled in eight steps?",
        "One in every step; two in total would be normal.",
        "path",
        ("graphs.every-step", "graphs.limit"),
        3,
    ),
    BrokenRun(
        "heads-in-the-mask",
        "The mask costs more than attention",
        "sgl-project/SpecForge#452 and pytorch/pytorch#134756",
        "The mask is built for each sequence and each head, although its mask_mod uses neither. "
        "create_block_mask evaluates it on the whole grid and runs out of memory.",
        "Where is the memory peak of step 0?",
        "In building the mask: the grid has 8 heads where H=None would be enough.",
        "memory",
        ("memory.mask-creation",),
    ),
    BrokenRun(
        "padding-of-infinity",
        "A softmax over nothing",
        "pytorch/pytorch#103749 and huggingface/transformers#32390",
        "Rows of padding have minus infinity in every cell. Their softmax is NaN, the next layer "
        "mixes it into its values, and 0 times NaN is NaN.",
        "Which layer has the first NaN, and in which rows?",
        "Layer 0, in the rows of padding; from there on every row has it.",
        "layers",
        ("numbers.nan",),
    ),
    BrokenRun(
        "order-of-the-wordings",
        "The order decides",
        "GuoYibo233/self-ensemble (positions run on over all segments)",
        "The wordings do not attend to each other, and still the answer changes when two of them "
        "are swapped: their positions are not reset, so their distances to the answer change.",
        "At which position id does the second wording begin?",
        "At the end of the first: the position ids are not reset. That is a choice to be aware of.",
        "tokens",
        ("positions.not-reset",),
    ),
    BrokenRun(
        "not-the-weights",
        "A heat map of something",
        "GuoYibo233/self-ensemble (a forward that returns its output twice)",
        "A patched attention returns its output twice, as if the second were the weights. A tool "
        "that asks for weights draws a heat map of it.",
        "Do the rows of the returned weights sum to 1?",
        "They do not, and the shape is not that of heads, rows and keys.",
        "attention",
        ("observer.not-weights",),
    ),
    BrokenRun(
        "ticked-picture",
        "All green",
        "the class of transformers' mask visualiser (huggingface/transformers PR#36630)",
        "A script builds a mask, draws it, checks it, and ticks it. Then it runs the model, which "
        "was never patched.",
        "What was executed, and what was drawn?",
        "The causal mask was executed; the declared mask is nowhere.",
        "mask",
        ("mask.not-applied", "mask.leak"),
    ),
    BrokenRun(
        "two-bos",
        "Two beginnings",
        "vllm-project/vllm PR#27515 and ggml-org/llama.cpp PR#7332",
        "A chat template puts the BOS into its text, and the tokenizer adds another one before it. "
        "Models were not trained on that; answers get a little worse, and nothing fails.",
        "What are the first two tokens?",
        "Both are the BOS; every span after them lies one position further on.",
        "tokens",
        ("segments.bos-doubled",),
    ),
    BrokenRun(
        "logger-breaks-flex",
        "The observer effect",
        "pytorch/pytorch#134385",
        "A dispatch mode logs every operation of the model. FlexAttention raises under it, and "
        "keeps raising after the logger is removed, until dynamo is reset.",
        "What raised in the second forward, without a logger?",
        "The same call as in the first: the failed trace was cached.",
        "path",
        ("observer.logger-breaks-flex",),
    ),
)


def find_broken_run(name: str) -> BrokenRun:
    """Return a broken run by name. Raises `UsageError` with the nearest name."""
    names = [run.name for run in BROKEN_RUNS]
    if name in names:
        return BROKEN_RUNS[names.index(name)]
    hint = did_you_mean(name, names, "'flexinspect museum' lists all of them.")
    raise UsageError(f"The museum has no exhibit '{name}'.", hint=hint)


def cache_folder() -> Path:
    """Return the folder of generated traces in the user's cache, one per version of the code.

    Raises `UsageError` without a home folder.
    """
    root = user_folder("XDG_CACHE_HOME", "LOCALAPPDATA", ".cache")
    if root is None:
        raise UsageError("There is no home folder for the cache.", hint="Add --out FILE.")
    return root / "flexinspect" / "museum" / f"{__version__}-{_code_fingerprint()}"


@cache
def _code_fingerprint() -> str:
    """Return a hash of the source files, so that traces of other versions are not used."""
    here = Path(__file__).parents[1]
    files = sorted([*here.rglob("*.py"), *(here.parent / "hooks").rglob("*.py")])
    versions = [(file.name, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(versions).encode()).hexdigest()[:12]
