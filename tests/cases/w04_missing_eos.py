"""Document borders come from EOS ids, and the tokenizer wrote none: all documents are one."""

import kit
import torch

EOS, DOCUMENTS = 2, ((1, 10, 11, 12), (1, 20, 21), (1, 30, 31, 32))


def packed(*, with_eos: bool) -> torch.Tensor:
    end = (EOS,) if with_eos else ()
    return torch.tensor([[id_ for document in DOCUMENTS for id_ in (*document, *end)]])


def documents_of(input_ids: torch.Tensor) -> torch.Tensor:
    """Return the document of each token: an EOS is the last token of its document."""
    ends = (input_ids[0] == EOS).long()
    return ends.cumsum(0) - ends


attention = kit.register_attention(kit.causal(1))
run = kit.logits_of(kit.tiny("own"))
for with_eos in (False, True):
    input_ids = packed(with_eos=with_eos)
    document, n = documents_of(input_ids), input_ids.shape[1]
    attention.cells = kit.causal(n) & (document[:, None] == document[None, :])
    last = kit.moved(run, input_ids, 1)[-1].item()
    print(
        f"EOS written: {with_eos}; documents found: {document.unique().numel()} of "
        f"{len(DOCUMENTS)} packed; document 1 moves the last row: {last > 1e-4}"
    )
