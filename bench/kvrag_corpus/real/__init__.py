"""Sets of questions over readable English, generated offline, for real language models.

People and facts are fictional, so no model knows them. `suite.py` has the sets by name.
"""

from kvrag_corpus.real.asked import NUM_CHOICES, Asked
from kvrag_corpus.real.prose import cut
from kvrag_corpus.real.suite import SETS, generate_set

__all__ = ["NUM_CHOICES", "SETS", "Asked", "cut", "generate_set"]
