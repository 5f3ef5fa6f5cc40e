"""Going back in a generation that is alive: restore a step, fork with another token or mask.

`journey` drives one generation and its branches; `lines` remembers what was chosen, `caches` what
was computed, `conditions` under which circumstances; `prices` says from where a step is reached;
`editedmask` runs an edited mask.
"""
