"""Eviction: a KV cache that forgets, while an answer is written, what no recent query needs.

=============  ==================================================================
`base`         what a policy is, and what it knows of the keys
`corm`         keys that no recent query found important go (the paper's method)
`streaming`    attention sinks and the most recent keys
`h2o`          the keys that drew most attention so far, and the most recent
`snapkv`       what the prompt's last queries attend to, chosen once
`registry`     policies by name
`ragged`       keys and values of heads that keep different numbers of them
`cache`        the Transformers cache that applies a policy
`attention`    attention over what is left, in unmodified layers
`report`       what stayed, and the memory it took
=============  ==================================================================
"""

NO_EVICTION = "none"
"""Stands for the full cache where policies are named."""
