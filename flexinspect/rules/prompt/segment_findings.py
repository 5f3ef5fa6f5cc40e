"""The finding kinds of the family `segments`: meaning, reason, check, fix and query of each id."""

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
_TOKENS_PANEL_HINT = "The tokens panel shows the input ids with their segments."

PROMPT_KINDS: Mapping[str, FindingKind] = {
    SHIFTED: FindingKind(
        Severity.WARNING,
        "all segments are off by the same number of tokens",
        why="Each segment includes tokens that are not its own and misses its last ones. "
        "Everything that isolates, pools or scores by segment uses the wrong tokens, without an "
        "error.",
        confirm="Compare the words on both sides of each border in the tokens panel, and check the "
        "rows named here in the mask panel.",
        fix="Count positions in the input ids: encode the pieces without special tokens, add the "
        "BOS yourself and sum up from there. Or shift all spans by the number given here.",
        query=_BORDER_QUERY,
    ),
    DRIFT: FindingKind(
        Severity.NOTE,
        "segments are off by a number of tokens that grows from one to the next",
        why="A piece that is encoded alone can have other tokens than inside the joined text, "
        "where words merge with their neighbors. Sums of piece lengths drift a little with each "
        "piece.",
        confirm="Compare the ids of each piece in the query with the tokens panel. In the mask "
        "panel the border is further off at each segment.",
        fix="Join ids instead of texts, or take the borders from the offsets of the joined text "
        "(return_offsets_mapping=True).",
        query=_PIECE_QUERY,
    ),
    ODD_BORDER: FindingKind(
        Severity.WARNING,
        "one border of one span is off, while all others are at line or sentence boundaries",
        why="The tokens in between belong to no segment or to the wrong one. A mask built from "
        "these spans separates them from the piece they are part of.",
        confirm="Compare the words on both sides of that border in the tokens panel.",
        fix="Move this border by the number of tokens given here, and look for an off-by-one error "
        "where the span is computed.",
        query=_BORDER_QUERY,
    ),
    SEGMENTS_MERGED: FindingKind(
        Severity.WARNING,
        "the executed mask has no border between two declared segments",
        why="Segments that should be isolated attend to each other: documents or paraphrases leak "
        "into later ones, and neither the loss nor the text shows it.",
        confirm="In the mask panel there are fewer diagonal blocks than segments. The query names "
        "the mask_mod of the executed mask.",
        fix="Check how the mask_mod counts segments. If borders come from EOS ids, put one after "
        "each document; otherwise pass the declared spans.",
        query=_PROMPT_MASK_QUERY,
    ),
    NOT_FOUND: FindingKind(
        Severity.WARNING,
        "a declared text is not in the input ids",
        why="The model did not read the text that the program declared, so every mask or score "
        "that uses this piece applies to other tokens.",
        confirm=f"{_TOKENS_PANEL_HINT} Search for the first words of the piece.",
        fix="Check what happens between the text and the ids: a template that strips or rewrites "
        "it, another normalization, a wrong variable, a truncation.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    TRUNCATED: FindingKind(
        Severity.WARNING,
        "the prompt ends or begins inside a declared piece",
        why="The model never read the rest. Masks made for the full length no longer fit, and a "
        "cut on the left removes the BOS and the instruction.",
        confirm=f"{_TOKENS_PANEL_HINT} Compare its last (or first) words with the piece.",
        fix="Raise max_length or shorten the pieces. Check the tokenizer's truncation and "
        "truncation_side.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    AMBIGUOUS: FindingKind(
        Severity.NOTE,
        "a declared text occurs several times in the prompt",
        why="The first occurrence after the previous piece was used. If another one was meant, all "
        "results for this segment are about the wrong tokens.",
        confirm=f"{_TOKENS_PANEL_HINT} Check that the segment is where it should be.",
        fix="Declare a longer text, or a span of positions.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    OVERLAP: FindingKind(
        Severity.WARNING,
        "two declared texts share tokens",
        why="A token belongs to one segment only. Where one token holds the end of a piece and the "
        "beginning of the next, no mask can separate the two.",
        confirm="The tokens panel shows the shared tokens; the second piece is not a segment "
        "there.",
        fix="Put a separator between the pieces that the tokenizer does not merge with either, or "
        "join ids instead of texts. If one piece is inside the other, declare only one of them.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    UNCOVERED: FindingKind(
        Severity.NOTE,
        "words between two declared pieces belong to no piece",
        why="They count as separators: presets attach them to the previous piece, and code that "
        "knows only the pieces leaves their rows without any key.",
        confirm=f"{_TOKENS_PANEL_HINT} The words are in the segments named separator.",
        fix="Declare them as a piece, or as part of the piece they introduce. Words of a chat "
        "template need no action.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    PADDING_INSIDE: FindingKind(
        Severity.WARNING,
        "a declared piece contains padding",
        why="Padding is not part of any text: the piece misses as many tokens at its other end, "
        "and its rows may have no key to attend to.",
        confirm=f"{_TOKENS_PANEL_HINT} Compare the first real word of the piece with its start.",
        fix="Count positions in the padded row, or add the number of padding tokens to each span. "
        "With right padding, stop at the last real token.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    BOS_MISSING: FindingKind(
        Severity.WARNING,
        "the prompt does not begin with the BOS that the tokenizer adds to every text",
        why="Models trained with a BOS use it as an attention sink. Without it the activations of "
        "the first rows differ from those in training, and answers degrade without an error.",
        confirm="The query returns the first input tokens.",
        fix="Encode the whole prompt with special tokens, or put bos_token_id first when you join "
        "ids yourself.",
        query=_PROMPT_START_QUERY,
    ),
    BOS_DOUBLED: FindingKind(
        Severity.WARNING,
        "the prompt begins with more than one BOS, or has further ones inside",
        why="Every position after it is one higher than in training, and positions counted with a "
        "single BOS are off by one.",
        confirm="The query returns the input tokens.",
        fix="A chat template and a tokenizer that both add the BOS are one too many: encode the "
        "template's text, and all pieces but the first, with add_special_tokens=False.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    EOS_INSIDE: FindingKind(
        Severity.WARNING,
        "an EOS ends pieces inside the prompt, from a tokenizer that adds one to every text",
        why="An EOS ends a text: the model reads what follows as another document, and a mask_mod "
        "that separates documents by EOS splits the prompt there.",
        confirm="The query returns the input tokens.",
        fix="Encode the pieces with add_special_tokens=False, or switch add_eos_token off. Packed "
        "documents need no action.",
        query=_PROMPT_TOKENS_QUERY,
    ),
    REORDERED: FindingKind(
        Severity.WARNING,
        "the order of texts in the input differs from the declared order",
        why="Code that counts pieces instead of locating them (a mask made piece by piece, the "
        "score of the second paraphrase) uses other pieces, and positions depend on the order.",
        confirm=f"{_TOKENS_PANEL_HINT} Compare their order with the declaration.",
        fix="Join and declare the pieces from one list. Look for a sort, a set or a dict in "
        "between.",
        query=_PIECE_QUERY,
    ),
    SPECIAL_AS_TEXT: FindingKind(
        Severity.WARNING,
        "the characters of a special token were encoded as ordinary tokens",
        why="The model reads punctuation where a turn or a text should end. It was not trained on "
        "that, and code that looks for the special id does not find it.",
        confirm="The tokens panel shows the characters in pieces, none of them marked as special.",
        fix="Encode without split_special_tokens, register the token with the tokenizer, or use "
        "the special tokens of this model instead of those of another.",
        query=_PROMPT_TOKENS_QUERY,
    ),
}
