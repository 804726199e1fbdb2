"""Eviction: a KV cache that forgets keys that no recent query needs, while it answers.

=============  ==================================================================
`base`         the base class of policies, and what they know about keys
`corm`         forgets keys that no recent query found important
`streaming`    keeps attention sinks and the most recent keys
`h2o`          keeps the keys that drew most attention so far, and the most recent
`snapkv`       keeps what the prompt's last queries attend to, chosen once
`registry`     policies by name
`ragged`       keys and values of heads that keep different numbers of them
`cache`        the Transformers cache that applies a policy
`attention`    attention over the remaining keys, in unmodified layers
`report`       which keys stayed, and the memory they took
=============  ==================================================================
"""

NO_EVICTION = "none"
"""The name for the full cache, among the names of policies."""
