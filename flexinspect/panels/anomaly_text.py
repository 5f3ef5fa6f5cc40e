"""Where the anomaly of a training step began, as text."""

from __future__ import annotations

from flexinspect.core.text import escape_unprintable, plural
from flexinspect.records import training_step


def describe_producer(producer: training_step.AnomalyOrigin) -> str:
    """Return one line on where the anomaly of a step began."""
    name, detail = escape_unprintable(producer.name), escape_unprintable(producer.detail)
    module = f"{name} ({escape_unprintable(producer.module)})" if producer.module else name
    output = f"the output of {module} is the first with NaN or Inf."
    if producer.name == training_step.MODEL_OUTPUT:
        owner = f"{escape_unprintable(producer.module) or 'the model'}'s own forward"
        output = f"{owner} made the first NaN or Inf; the outputs of its modules were finite."
    texts = {
        "input": "the batch has NaN or Inf.",
        "weights": f"the weights {name} have NaN or Inf.",
        "module": output,
        "loss": "the loss produces NaN or Inf.",
        "backward": f"the gradient of {name} is the first with NaN or Inf.",
        "explosion": f"the gradient of {name} explodes ({detail}).",
        "vanishing": f"the gradient of {name} vanishes ({detail}).",
    }
    others = plural(producer.n_affected, "other")
    inherited = f" {others} only propagate it." if producer.n_affected else ""
    return texts.get(producer.kind, f"{escape_unprintable(producer.kind)} {name}.") + inherited
