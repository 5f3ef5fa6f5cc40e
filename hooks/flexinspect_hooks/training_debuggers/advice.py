"""What usually helps against problems in training: sentences for logs and pages."""

from __future__ import annotations

from collections.abc import Mapping

NAN_LOSS = (
    "Check the inputs for NaN, Inf and labels out of range.",
    "Check the parameters: one that is NaN already makes every later loss NaN.",
    "Lower the learning rate; above 1.0 it is rarely meant.",
)
EXPLOSION = (
    "Lower the learning rate.",
    "Clip the gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).",
    "Check how the inputs are scaled.",
)
VANISHING = (
    "Raise the learning rate.",
    "Use other activations (ReLU or GELU in place of sigmoid or tanh).",
    "Check how the parameters are initialised.",
    "Add skip connections.",
)
MEMORY = (
    "Make the batches smaller.",
    "Use gradient checkpointing.",
    "Move rarely used tensors to the CPU.",
    "Train in mixed precision.",
)
ANOMALY_RATE = (
    "Check the architecture: normalisation, and layers that end in NaN for some inputs.",
    "Check the preprocessing of the data.",
    "Lower the learning rate.",
    "Check how the parameters are initialised.",
)
NOTHING_FOUND = (
    "Check torch.is_anomaly_enabled() inside the training step: the switch may be off.",
    "Use the context manager around forward and backward, not only around the backward pass.",
    "Check the version: torch.__version__ must be the one that flexinspect was installed for.",
)
HISTORY = (
    "A history is bounded: use a smaller one with history=…",
    "Clear it from time to time with clear_debug_history().",
)

ADVICE_BY_KIND: Mapping[str, tuple[str, ...]] = {
    "loss": NAN_LOSS,
    "nan": NAN_LOSS,
    "inf": NAN_LOSS,
    "explosion": EXPLOSION,
    "jump": EXPLOSION,
    "vanishing": VANISHING,
    "memory": MEMORY,
    "anomaly rate": ANOMALY_RATE,
    "nothing found": NOTHING_FOUND,
    "history": HISTORY,
}
"""What helps, by kind of problem."""


def advice(kind: str) -> tuple[str, ...]:
    """What usually helps against a kind of problem, () for an unknown kind."""
    return ADVICE_BY_KIND.get(kind, ())
