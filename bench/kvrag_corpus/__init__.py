"""A corpus generator whose questions need attention between chunks.

`generate_corpus` invents persons, writes short documents about them and asks questions of
five labelled types. Which file holds what:

=============  ==================================================================
`names`        names from syllables; splits that share none
`grammar`      relations, trades, wordings, and how varied a text is
`people`       persons, their chunks and facts
`layout`       a random order in which "the baker" still means one person
`wording`      a planned chunk as a paragraph
`questions`    questions by type, with answers that are copied spans
`context`      all of these together: the chunks of one prompt, and its questions
`corpus`       files of documents and questions, written and read
`generate`     a whole corpus from a seed
=============  ==================================================================
"""

from kvrag_corpus.corpus import ContextChunk, Corpus, CorpusQuestion, SourceDocument
from kvrag_corpus.generate import generate_corpus
from kvrag_corpus.grammar import UNKNOWN_ANSWER, Grammar
from kvrag_corpus.names import SPLITS, Split, names_of_split, split_of_name
from kvrag_corpus.questions import TYPE_SHARES, QuestionType

__all__ = [
    "SPLITS",
    "TYPE_SHARES",
    "UNKNOWN_ANSWER",
    "ContextChunk",
    "Corpus",
    "CorpusQuestion",
    "Grammar",
    "QuestionType",
    "SourceDocument",
    "Split",
    "generate_corpus",
    "names_of_split",
    "split_of_name",
]
