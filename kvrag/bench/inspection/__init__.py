"""What reuse does to one prompt: KV deviation, the tokens policies pick, attention, deltas.

=============  ==================================================================
`measure`      one prompt's figures
`picture`      figures as PNGs
=============  ==================================================================
"""
