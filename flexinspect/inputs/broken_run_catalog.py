"""The museum's catalogue: what each broken run imitates, what it asks, and where the answer is.

The programs themselves are in `flexinspect_hooks.broken_runs`, a function for each name (with "_"
for "-"); nothing here needs torch.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexinspect.core import __version__
from flexinspect.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class BrokenRun:
    """A run with one fault, and its tutorial.

    `expected` are ids of which at least one must be found; `panel` and `step` are where the answer
    stands. `case` names what was reported in public.
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
        """Return the tutorial in words, paragraph by paragraph."""
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
        "Which row is on the wrong side of a border, and what does it see?",
        "Flip the mask to the difference: at each border one row is lost and one leaks.",
        "mask",
        (
            *("segments.shifted", "mask.leak", "mask.lost", "mask.not-applied"),
            "decode.prompt-row-generated",
        ),
    ),
    BrokenRun(
        "orphan-separators",
        "Line breaks that belong to nobody",
        "masks built from spans alone, as in GuoYibo233/self-ensemble (generate_flex_attention.py)",
        "A token may look at its own wording. The BOS and the line breaks between the wordings are "
        "of no wording, so their rows are closed altogether; the answer reads them nevertheless.",
        "Which rows see nothing, and who reads them?",
        "The empty rows are marked at the edge; the finding counts the rows that read them.",
        "mask",
        ("mask.empty-row",),
    ),
    BrokenRun(
        "missing-eos",
        "Three documents, one mask",
        "pytorch/torchtitan#3130 and pytorch/torchtitan#1144",
        "Packed documents are told apart by the EOS between them: the mask counts them. The "
        "tokenizer wrote none, so all are one document and attend to each other. The loss is fine.",
        "How many pieces does the mask have, and how many were packed?",
        "The mask is one triangle, where three were declared.",
        "mask",
        ("mask.merged", "mask.not-applied", "mask.leak"),
    ),
    BrokenRun(
        "placeholder-mask",
        "FlexAttention without fallback",
        "GuoYibo233/self-ensemble (flex_attention_generate.py at ac7efa7)",
        "The log says that FlexAttention ran, without fallback, in all layers. So it did: with the "
        "placeholder that was to be replaced by the mask some day. It is true everywhere.",
        "Does any row see what comes after it?",
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
        "Which layer did not run what the others ran, and what did it swallow?",
        "One row of the strip of layers has another colour; its exception stands beside it.",
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
        "It received none, on a path that is causal by itself; the declared structure is missing.",
        "mask",
        ("mask.not-applied", "mask.leak"),
    ),
    BrokenRun(
        "no-mask-function",
        "A name without a mask function",
        "huggingface/transformers#46132 and huggingface/transformers PR#45811",
        "An attention function is registered under a name of its own. Transformers makes masks by "
        "name, knows none for this one, and hands on None: with FlexAttention that is no mask.",
        "What can the first token see?",
        "Everything: the layers received no mask, and every key is open.",
        "mask",
        ("mask.none", "mask.future"),
    ),
    BrokenRun(
        "bool-mask-added",
        "True is one",
        "huggingface/transformers#29525 and huggingface/transformers#32195",
        "A 4D mask of bools is right under SDPA. Under eager attention it is added to the scores: "
        "open cells get one more, and nothing is closed.",
        "Which cells does a mask of bools close here?",
        "None: the mask received is bool, the mask executed is open everywhere.",
        "mask",
        ("mask.bool-added",),
    ),
    BrokenRun(
        "leak-through-separators",
        "Isolated in every picture",
        "GuoYibo233/self-ensemble (myriadlama_custom_attention_generate.py: group 0)",
        "No wording sees another one: the cells are closed. But the line breaks between them see "
        "all that was before, and everybody sees the line breaks. One layer on, it is all there.",
        "From which layer on does the third wording know the first, and through which rows?",
        "Follow the rows of the line breaks, which both wordings touch.",
        "mask",
        ("reach.leak",),
    ),
    BrokenRun(
        "decode-without-offset",
        "The first token was right",
        "NVIDIA-NeMo/Megatron-Bridge PR#5259 and meta-pytorch/attention-gym#46",
        "The first token is right and all that follow are not. In a decode step the only row has "
        "the index 0, and the rule (no key after the row) leaves it the first key.",
        "How many keys does the row of step 1 see, and how many of step 0?",
        "The newest row of the prompt sees all keys, the row of step 1 sees one.",
        "mask",
        ("decode.no-offset",),
        1,
    ),
    BrokenRun(
        "empty-cache-slots",
        "Attention to nothing",
        "meta-pytorch/gpt-fast#233",
        "A static cache has more slots than tokens, and the mask of a decode row is open over all "
        "that were allocated. An empty slot scores 0, which softmax takes for a score like any.",
        "How much of the weight of a step lies on slots that hold nothing?",
        "More keys are allowed than are filled; the finding has the share of the weight.",
        "mask",
        ("cache.empty-slots",),
        1,
    ),
    BrokenRun(
        "lost-cache",
        "A cache that stays empty",
        "adapter-hub/adapters#824 and unslothai/unsloth-zoo#281",
        "A logger around one layer's attention hands the cache on under the name that it had years "
        "ago, and a catch-all keyword swallows the new one. That layer forgets the prompt.",
        "How many keys does each layer's cache hold after the prompt?",
        "Layer 1 holds none; in step 1 it attends to one key, where others attend to all.",
        "path",
        ("cache.empty-layer", "cache.lost"),
        1,
    ),
    BrokenRun(
        "no-cache",
        "Everything again, in every layer",
        "GuoYibo233/self-ensemble (generate_flex_attention.py: a loop without a cache)",
        "Each step feeds the whole sequence again, and each layer builds the very mask that the "
        "layer before has built. The answer is right, and takes the square of its length.",
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
        "and says why; a net around the call catches that, and runs attention without a mask.",
        "For how many keys was the mask made, and how many were there?",
        "Every layer of every decode step fell back; the swallowed exception has the lengths.",
        "path",
        ("lengths.mask-kv", "path.fallback", "path.swallowed", "path.bypass"),
        1,
    ),
    BrokenRun(
        "graph-every-step",
        "A compile for each token",
        "meta-pytorch/attention-gym#15",
        "The rule of each decode step is new code, as in a notebook cell that is run again. No "
        "graph that was compiled before can serve it, so each token pays for a compile.",
        "How many graphs were made in eight steps?",
        "One in every step; two in all would be healthy.",
        "path",
        ("graphs.every-step", "graphs.limit"),
        3,
    ),
    BrokenRun(
        "heads-in-the-mask",
        "The mask costs more than attention",
        "sgl-project/SpecForge#452 and pytorch/pytorch#134756",
        "The mask is built for each sequence and each head, though its rule looks at neither. "
        "Building evaluates the rule on the whole grid: memory runs out before attention begins.",
        "Where does the peak of step 0 lie?",
        "In building the mask; the grid names 8 heads, where None would do.",
        "memory",
        ("memory.mask-creation",),
    ),
    BrokenRun(
        "padding-of-infinity",
        "A softmax over nothing",
        "pytorch/pytorch#103749 and huggingface/transformers#32390",
        "Rows of padding are closed with minus infinity in every cell. Softmax over that is NaN, "
        "the next layer mixes it into its values, and 0 times NaN is NaN.",
        "Which layer makes the first NaN, and in which rows?",
        "Layer 0, in the rows of padding; from there on every row has it.",
        "layers",
        ("numbers.nan",),
    ),
    BrokenRun(
        "order-of-the-wordings",
        "The order decides",
        "GuoYibo233/self-ensemble (positions run on over all segments)",
        "The wordings do not see each other, and still the answer changes when two of them are "
        "swapped: their positions run on, so the answer sees them at different distances.",
        "At which position id does the second wording begin?",
        "At the end of the first: the position ids do not start again. A choice, to be known of.",
        "tokens",
        ("positions.not-reset",),
    ),
    BrokenRun(
        "not-the-weights",
        "A heat map of something",
        "GuoYibo233/self-ensemble (a forward that returns its output twice)",
        "A patched attention returns its output twice, as if the second were the weights. Whoever "
        "asks for weights draws a heat map of it.",
        "Do the rows of what was returned add up to 1?",
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
        "Executed is the plain causal mask; what was declared is nowhere.",
        "mask",
        ("mask.not-applied", "mask.leak"),
    ),
    BrokenRun(
        "two-bos",
        "Two beginnings",
        "vllm-project/vllm PR#27515 and ggml-org/llama.cpp PR#7332",
        "A chat template writes the BOS into its text, and the tokenizer writes another one before "
        "it. Models were not trained on that; answers get a little worse, and nothing fails.",
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
        "goes on raising after the logger is gone, until dynamo is reset.",
        "What raised in the second forward, where no logger was left?",
        "The same call as in the first: the failed trace was remembered.",
        "path",
        ("observer.logger-breaks-flex",),
    ),
)


def find_broken_run(name: str) -> BrokenRun:
    """Return the exhibit of a name. Raises `UsageError` with the nearest one."""
    names = [one.name for one in BROKEN_RUNS]
    if name in names:
        return BROKEN_RUNS[names.index(name)]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "'flexinspect museum' lists all of them."
    raise UsageError(f"The museum has no exhibit '{name}'.", hint=hint)


def cache_folder() -> Path:
    """Return where built exhibits are kept: in the user's cache folder, for this very version.

    Raises `UsageError` without a home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if not base and sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    try:
        root = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        raise UsageError("There is no home folder to build in.", hint="Add --out FILE.") from None
    return root / "flexinspect" / "museum" / f"{__version__}-{_code_fingerprint()}"


@cache
def _code_fingerprint() -> str:
    """Return what changes with the code: an exhibit that an older one built is built anew."""
    here = Path(__file__).parents[1]
    files = sorted([*here.rglob("*.py"), *(here.parent / "hooks").rglob("*.py")])
    facts = [(file.name, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
