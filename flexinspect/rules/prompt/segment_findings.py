"""The findings of the family `segments`: what each means, why it matters, how to go on."""

from __future__ import annotations

from collections.abc import Mapping

from flexinspect.records.finding import Severity
from flexinspect.rules.engine import FindingKind

SHIFTED = "segments.shifted"
DRIFT = "segments.drift"
ODD_BORDER = "segments.odd-border"
SEGMENTS_MERGED = "segments.merged"
NOT_FOUND = "segments.not-found"
TRUNCATED = "segments.truncated"
AMBIGUOUS = "segments.ambiguous"
OVERLAP = "segments.overlap"
UNCOVERED = "segments.uncovered"
PADDING_INSIDE = "segments.padding-inside"
BOS_MISSING = "segments.bos-missing"
BOS_DOUBLED = "segments.bos-doubled"
EOS_INSIDE = "segments.eos-inside"
REORDERED = "segments.reordered"
SPECIAL_AS_TEXT = "segments.special-as-text"

_BRANCH_WHERE = "generation = {generation} AND branch = {branch}"
_PROMPT_QUERY = (
    f"SELECT pos, token_id, token, text, special FROM tokens WHERE {_BRANCH_WHERE} AND step IS NULL"
)
_PROMPT_TOKENS_QUERY = f"{_PROMPT_QUERY} ORDER BY pos"
_PROMPT_START_QUERY = f"{_PROMPT_QUERY} ORDER BY pos LIMIT 8"
_BORDER_QUERY = (
    "SELECT s.label, s.start, s.stop, t.pos, t.text FROM segments AS s JOIN tokens AS t "
    "USING (generation, branch) WHERE t.pos IN (s.start - 1, s.start, s.stop - 1, s.stop) "
    f"AND {_BRANCH_WHERE} ORDER BY s.start, t.pos"
)
_PIECE_QUERY = (
    "SELECT declared ->> '$.pieces' AS pieces FROM generations WHERE generation = {generation}"
)
_PROMPT_MASK_QUERY = (
    "SELECT c.layer, c.path, m.fingerprint, m.kind, m.rule, m.rule_source FROM calls AS c "
    "JOIN masks AS m ON m.fingerprint = c.mask WHERE c.generation = {generation} "
    "AND c.branch = {branch} AND c.step = {step} ORDER BY c.layer"
)
_TOKENS_PANEL_HINT = "The tokens panel shows the ids as they were fed, with their segments."

PROMPT_KINDS: Mapping[str, FindingKind] = {
    SHIFTED: FindingKind(
        Severity.WARNING,
        "all segments are off by the same number of tokens",
        "Each segment takes in tokens that are not its own and loses its last ones, so whatever "
        "isolates, pools or scores by segments does it for the wrong tokens, without an error.",
        "Look in the tokens panel at the words on both sides of each border, and in the mask panel "
        "at the rows named here.",
        "Count positions in the ids that are fed: encode the pieces without special tokens, put "
        "the BOS in yourself, and add up from there; or move all spans by the number said here.",
        _BORDER_QUERY,
    ),
    DRIFT: FindingKind(
        Severity.NOTE,
        "segments are off by a number of tokens that grows from one to the next",
        "Pieces that are encoded one by one have other tokens than the joined text, where words "
        "merge with their neighbours; sums of their lengths go astray a little more at each piece.",
        "Compare the pieces' own ids in the query with the tokens panel; in the mask panel the "
        "border lies further from the words at each segment.",
        "Join ids instead of texts, or take the borders from the offsets that the tokenizer gives "
        "for the joined text (return_offsets_mapping=True).",
        _PIECE_QUERY,
    ),
    ODD_BORDER: FindingKind(
        Severity.WARNING,
        "one border of one span lies beside its line, where all others fit",
        "The tokens between belong to no segment, or to the wrong one, and a mask made of these "
        "spans cuts them off from the piece that they are part of.",
        "Look in the tokens panel at the words on both sides of that border.",
        "Move this border by the number of tokens said here, and look for an index that is off by "
        "one where the span is computed.",
        _BORDER_QUERY,
    ),
    SEGMENTS_MERGED: FindingKind(
        Severity.WARNING,
        "the executed mask has no border where two declared segments meet",
        "Segments that were meant to be apart see each other as one: documents or paraphrases "
        "leak into those after them, and neither the loss nor the text shows it.",
        "In the mask panel the blocks on the diagonal are fewer than the segments; the query names "
        "the rule that made the mask.",
        "Count what the rule counts: if borders come from EOS ids, write one after each document; "
        "otherwise give the rule the declared spans.",
        _PROMPT_MASK_QUERY,
    ),
    NOT_FOUND: FindingKind(
        Severity.WARNING,
        "a declared text is not in the ids that were fed",
        "What the program believes to have fed is not what the model read: every mask or score "
        "that counts on this piece is about other tokens.",
        f"{_TOKENS_PANEL_HINT} Search there for the first words of the piece.",
        "Look at what lies between the text and the ids: a template that strips or rewrites it, "
        "another normalisation, a wrong variable, a truncation.",
        _PROMPT_TOKENS_QUERY,
    ),
    TRUNCATED: FindingKind(
        Severity.WARNING,
        "the prompt ends, or begins, inside of a declared piece",
        "The model never read the rest. Masks made for the whole length no longer fit, and a cut "
        "at the left takes the BOS and the instruction away.",
        f"{_TOKENS_PANEL_HINT} Compare its last, or first, words with the piece.",
        "Raise max_length or shorten the pieces; look at the tokenizer's truncation and "
        "truncation_side.",
        _PROMPT_TOKENS_QUERY,
    ),
    AMBIGUOUS: FindingKind(
        Severity.NOTE,
        "a declared text lies in several places of the prompt",
        "The first place after the piece before it was taken; if another one was meant, all that "
        "is said about this segment is about the wrong tokens.",
        f"{_TOKENS_PANEL_HINT} See whether the segment lies where it was meant.",
        "Declare a longer text, or the span of positions.",
        _PROMPT_TOKENS_QUERY,
    ),
    OVERLAP: FindingKind(
        Severity.WARNING,
        "two declared texts share tokens",
        "A token belongs to one segment alone. Where a token holds the end of one piece and the "
        "beginning of the next, no mask can keep the two apart.",
        "Look at the shared tokens in the tokens panel; the second piece is not a segment there.",
        "Put a separator between the pieces that the tokenizer keeps apart from both, or join ids "
        "instead of texts; if one piece lies inside the other, declare one of them.",
        _PROMPT_TOKENS_QUERY,
    ),
    UNCOVERED: FindingKind(
        Severity.NOTE,
        "words between two declared pieces belong to none",
        "They count as separators: a preset lets them go with the piece before, and code that "
        "knows the pieces alone gives their rows no keys at all.",
        f"{_TOKENS_PANEL_HINT} The words lie in the segments named separator.",
        "Declare them too, as a piece of their own or as part of the piece that they introduce; "
        "leave it if they are a template's.",
        _PROMPT_TOKENS_QUERY,
    ),
    PADDING_INSIDE: FindingKind(
        Severity.WARNING,
        "a declared piece holds padding",
        "Padding is no part of any text: the piece is as many tokens short at its other end, and "
        "its rows may see no key.",
        f"{_TOKENS_PANEL_HINT} Compare the first real word of the piece with its start.",
        "Count positions in the padded row, or add the number of pads to each span; with padding "
        "on the right, stop at the last real token.",
        _PROMPT_TOKENS_QUERY,
    ),
    BOS_MISSING: FindingKind(
        Severity.WARNING,
        "the prompt does not begin with the BOS that the tokenizer puts before every text",
        "Models that were trained with a BOS use it as a place to rest attention on; without it "
        "the first rows' numbers are unlike any in training, and answers get worse in silence.",
        "The query gives the first tokens that were fed.",
        "Encode the whole prompt with special tokens, or put bos_token_id first when ids are "
        "joined by hand.",
        _PROMPT_START_QUERY,
    ),
    BOS_DOUBLED: FindingKind(
        Severity.WARNING,
        "the prompt begins with more than one BOS, or has further ones inside",
        "Every position after it is one more than in training, and positions that were counted "
        "with a single BOS are off by one.",
        "The query gives the tokens that were fed.",
        "A chat template that writes the BOS and a tokenizer that adds it are one too many: encode "
        "the template's text, and all pieces but the first, with add_special_tokens=False.",
        _PROMPT_TOKENS_QUERY,
    ),
    EOS_INSIDE: FindingKind(
        Severity.WARNING,
        "an EOS ends pieces inside of the prompt, from a tokenizer that puts one behind every text",
        "An EOS says that the text is over: what follows it is read as another document, and rules "
        "that tell documents apart by EOS cut the prompt there.",
        "The query gives the tokens that were fed.",
        "Encode the pieces with add_special_tokens=False, or switch add_eos_token off; leave it "
        "if documents are packed one after the other.",
        _PROMPT_TOKENS_QUERY,
    ),
    REORDERED: FindingKind(
        Severity.WARNING,
        "declared texts were fed in another order than they were declared in",
        "Whatever counts pieces instead of looking for them (a mask made piece by piece, scores of "
        "the second paraphrase) is about other pieces; and positions depend on the order.",
        f"{_TOKENS_PANEL_HINT} Compare their order with that of the declaration.",
        "Join and declare the pieces from one list; look for a sort, a set or a dict between them.",
        _PIECE_QUERY,
    ),
    SPECIAL_AS_TEXT: FindingKind(
        Severity.WARNING,
        "the characters of a special token were fed as ordinary tokens",
        "The model reads punctuation where the end of a turn or a text was meant: it was never "
        "trained on that, and nothing that looks for the special id finds one.",
        "The tokens panel shows the characters in pieces, none of them marked as special.",
        "Encode without split_special_tokens, register the token with the tokenizer, or use the "
        "special tokens of this model instead of those of another.",
        _PROMPT_TOKENS_QUERY,
    ),
}
