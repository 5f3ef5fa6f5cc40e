"""Records of the gradients of a generated token, as those of `flexinspect.records.step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any

GRADIENT_TARGETS = ("logprob", "margin")
PARAMETER_PARTS = (
    *("embedding", "q", "k", "v", "qkv", "o", "attention", "mlp", "norm", "lm_head", "tied"),
    "other",
)
"""Groups of parameters; "tied" is an embedding that is also the output head."""


class GradientStat(Struct, frozen=True):
    """The gradient of one parameter: its Euclidean norm, largest absolute value, NaN and Inf.

    `layer` is None outside of all layers; `part` is one of `PARAMETER_PARTS`.
    """

    name: str
    norm: float
    max: float
    n_nan: int
    n_inf: int
    layer: int | None = None
    part: str | None = None


class GradientRecord(Struct, frozen=True):
    """Gradients of one generated token: of its log-probability, or of its margin to the next best.

    They come from a separate forward over the whole sequence before the token, without a cache.
    `value` is the differentiated quantity, `scale` the norm of its gradient at the logits,
    `runner_up_id` the other token id of a margin. `logits_error` is the largest difference between
    the logits of this forward and the recorded ones, relative to the largest recorded logit; above
    `tolerance` (or NaN) this forward is not what ran, and nothing else is recorded.

    `n_unreached` parameters have no influence on the token; those of layers that are unreached as a
    whole are in `stats`, with 0. `anomaly` is the message of autograd's anomaly mode. `tokens` is
    float (2, positions): gradient times input, and the norm of the gradient, at each token's
    embedding. `layers` is float (layers + 1,): the norms at the embeddings and at each layer's
    output, 0 where no gradient arrives, NaN for layers without attention.
    """

    generation: int
    step: int
    token_id: int
    target: str
    value: float
    scale: float
    path: str
    logits_error: float
    tolerance: float
    wall_ms: float
    branch: int = 0
    runner_up_id: int | None = None
    n_unreached: int = 0
    anomaly: str | None = None
    stats: tuple[GradientStat, ...] = ()
    tokens: Array | None = None
    layers: Array | None = None

    @property
    def matches_recorded(self) -> bool:
        """Whether the forward of the gradients reproduced the recorded logits."""
        return self.logits_error <= self.tolerance
