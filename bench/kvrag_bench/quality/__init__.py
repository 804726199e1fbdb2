"""The referee: every policy and codec against full prefill, question by question.

Questions, the bank of their chunks and answers are those of `kvrag.tune`, which judges policies
for `kvrag calibrate`.

=============  ==================================================================
`datasets`     the generator's test split, beside data sets in files
`metrics`      F1, substring match, ROUGE-L
`codecs`       the codecs that take part, each fitted to the model
`oracle`       the policy that knows which tokens are furthest off
`rows`         many answers as one row of figures
`contest`      which policies take part, and the run itself
`picture`      rows as a PNG
=============  ==================================================================
"""
