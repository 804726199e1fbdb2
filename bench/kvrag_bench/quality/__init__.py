"""The referee: every policy and codec against full prefill, question by question.

Questions, the bank of their chunks and answers are those of `kvrag.tune`, which judges policies
for `kvrag calibrate`.

=============  ==================================================================
`datasets`     the generator's test split, beside data sets in files
`metrics`      F1, substring match, ROUGE-L
`codecs`       the codecs that take part, each fitted to the model
`oracle`       the policy that knows which tokens are furthest off
`results`      judgements in a file, so that a run continues
`rows`         many judgements as one row of figures
`contest`      which policies take part, and the run itself
`part`         one of several processes that share a run
`picture`      rows as a PNG
=============  ==================================================================
"""
