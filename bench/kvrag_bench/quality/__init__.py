"""The referee: every policy and codec against full prefill, question by question.

=============  ==================================================================
`questions`    one record of a data set, and the prompt made of it
`datasets`     the generator's test split, MuSiQue-layout JSON, LongBench-layout JSONL
`metrics`      exact match, F1, substring match, ROUGE-L
`bootstrap`    paired intervals
`bank`         the chunks of all questions, stored once through each codec
`answers`      the reference's answer, and a policy's held against it
`rows`         many answers as one row of figures
`contest`      which policies take part, and the run itself
`picture`      rows as a PNG
=============  ==================================================================
"""
