"""A corpus generator whose questions need attention between chunks.

Imports no package. It invents persons, writes short documents about them and asks questions of
five labelled types.
Begin with `generate.py`, a corpus from a seed; `context.py` makes one prompt with its questions.
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
