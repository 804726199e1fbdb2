"""What reuse does to one prompt: KV deviation, the tokens policies pick, attention, deltas.

=============  ==================================================================
`measure`      one prompt's figures
`picture`      figures as PNGs
`eviction`     what an eviction policy keeps of a prompt, head by head
`kept_text`    the same as a picture: the prompt, as dark as it is kept
=============  ==================================================================
"""
