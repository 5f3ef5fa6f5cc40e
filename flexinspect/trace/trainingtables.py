"""The table of training steps; their gradients are in `grads`."""

from __future__ import annotations

from flexinspect.trace.columns import define_table

TRAINING_STEPS = define_table(
    "training_steps",
    "generation branch step",
    "What a step of phase train learned from, did and took. Counts are of parameters, norms of the "
    "gradients as the optimizer got them; groups are in the order of `declared.training.groups` of "
    "the generation, or of `groups` in its newest event of kind `parameters`.",
    """
    generation        int    the generation
    branch            int    the branch
    step              int    the optimizer step
    loss              real   the loss
    loss_source       text   told, output (the loss that the model returned), or empty: not known
    learning_rates    json   of each group of the optimizer, a list of numbers; NaN: unknown
    total_norm        real?  norm of all gradients together, NULL when not measured
    norm_before_clip  real?  norm before clip_grad_norm_, NULL when that was not seen
    max_norm          real?  limit given to clip_grad_norm_
    n_parameters      int    those that have a gradient
    n_exploding       int    those with a norm above 10
    n_vanishing       int    matrices with a norm below 1e-6, not 0
    n_dead            int    those whose gradient is 0 everywhere
    n_sick            int    those with NaN or Inf in the gradient
    group_norms       json   norm of each group's gradients, a list; empty when not measured
    group_ratios      json   norm of each group's change over that of its weights; empty likewise
    producer          json?  where trouble began: kind, name, n_carriers, detail
    n_backward        int    backward passes since the last step: micro-batches
    forward_ms        real   forward passes
    backward_ms       real   backward passes
    optimizer_ms      real   the optimizer's step
    data_ms           real?  waiting for the watched loader, NULL when none is watched
    other_ms          real   the rest of the time since the last step
    scale             real?  scale of the GradScaler, NULL without one
    is_skipped        bool   1 when the GradScaler left the optimizer's step out
    device            text   where the output of the model was
    autocast          text   type of autocast, empty without it
    detail            text   how much was measured: extreme, advanced, basic or sparse
    """,
)
