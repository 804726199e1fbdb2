"""Sets of questions over readable English, generated offline, for real language models.

People and facts are fictional, so no model knows them. Which file holds what:

=============  ==================================================================
`words`        names of people, and values of facts
`attributes`   kinds of facts with their wordings
`people`       who takes part, and the facts about them
`prose`        pages of text, cut into chunks
`asked`        a question with its chunks and choices
`biography`    one life to a chunk, a question about one fact
`needle`       a code word or a number for a city, in long prose
`carried`      documents whose second chunk says only "she" or "the firm"
`bridge`       the director of a firm in one chunk, that person's life in another
`code`         a function that one chunk defines and another calls
`summary`      the chunks of a page, shuffled
`suite`        the sets by name
=============  ==================================================================
"""

from kvrag_corpus.real.asked import NUM_CHOICES, Asked
from kvrag_corpus.real.prose import cut
from kvrag_corpus.real.suite import SETS, generate_set

__all__ = ["NUM_CHOICES", "SETS", "Asked", "cut", "generate_set"]
