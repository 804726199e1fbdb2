"""`kvrag bench codec`: what every codec takes and loses, how fast it is, and against what.

=================  ==================================================================
`options`          what to measure
`rows`             what was measured
`sources`          real KV: a decoder's, or an encoder's keys and values
`records`          chunks through a codec: bytes, error, entropy
`presets`          the codecs users can name, as rows
`designs`          the same codec with one stage exchanged, at equal distortion
`baselines`        CacheGen's public scheme and plain 8-bit quantisation
`speed`            the entropy coder alone, against others (`contenders`)
`decoding`         a whole context into the fused buffer, against prefilling it
`run`              all of these, in order
`picture`          rate-distortion curves
=================  ==================================================================
"""
