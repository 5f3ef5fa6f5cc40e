"""Rewind a running generation: restore a step, fork with another token, or edit the mask.

`branching_decoder` drives one generation and its branches. `branch_state` holds the chosen tokens
and the conditions they were computed under, `cache_store` the KV caches. `branch_recorder` writes
branches to the trace, `edited_mask` runs an edited mask, and `command_handler` executes the
commands of the user.
"""
