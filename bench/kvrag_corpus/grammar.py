"""The grammar: relations with their wordings, trades, openings, and how varied a text is."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN_ANSWER = "unknown"
"""The fixed answer of every question that the given documents do not answer."""


@dataclass(frozen=True)
class Relation:
    """One kind of fact about a person.

    Attributes
    ----------
    name
        Label, unique.
    statements
        Verb phrases with ``{value}``, each the predicate of a sentence.
    questions
        Questions with ``{subject}``.
    value_is_person
        Whether the value is a person, so that a second hop can start from it.
    changes
        Whether a later document may correct it ("now ...").
    role
        Noun for the value when it is a person: "the {role} of {subject}".
    """

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    value_is_person: bool = False
    changes: bool = False
    role: str = ""


RELATIONS: tuple[Relation, ...] = (
    Relation(
        "home",
        ("lives in {value}", "keeps a house in {value}"),
        ("Where does {subject} live?", "Where is the house of {subject}?"),
        changes=True,
    ),
    Relation(
        "birthplace",
        ("was born in {value}", "comes from {value}"),
        ("Where was {subject} born?", "Where does {subject} come from?"),
    ),
    Relation(
        "school",
        ("studied in {value}", "went to school in {value}"),
        ("Where did {subject} study?", "Where did {subject} go to school?"),
    ),
    Relation(
        "boat",
        ("sails the boat {value}", "owns the boat {value}"),
        ("Which boat does {subject} sail?", "Which boat does {subject} own?"),
        changes=True,
    ),
    Relation(
        "horse",
        ("rides the horse {value}", "feeds the horse {value}"),
        ("Which horse does {subject} ride?", "Which horse does {subject} feed?"),
        changes=True,
    ),
    Relation(
        "employer",
        ("works for {value}", "is paid by {value}"),
        ("Who does {subject} work for?", "Who pays {subject}?"),
        value_is_person=True,
        changes=True,
        role="employer",
    ),
    Relation(
        "teacher",
        ("learned from {value}", "was taught by {value}"),
        ("Who did {subject} learn from?", "Who taught {subject}?"),
        value_is_person=True,
        role="teacher",
    ),
    Relation(
        "friend",
        ("trusts {value}", "is a friend of {value}"),
        ("Who does {subject} trust?", "Who is the friend of {subject}?"),
        value_is_person=True,
        changes=True,
        role="friend",
    ),
    Relation(
        "rival",
        ("fears {value}", "is a rival of {value}"),
        ("Who does {subject} fear?", "Who is the rival of {subject}?"),
        value_is_person=True,
        changes=True,
        role="rival",
    ),
    Relation(
        "buyer",
        ("sells cloth to {value}", "sends cloth to {value}"),
        ("Who buys cloth from {subject}?", "Who gets cloth from {subject}?"),
        value_is_person=True,
        changes=True,
        role="buyer",
    ),
)

TRADES: tuple[str, ...] = (
    "baker",
    "carpenter",
    "doctor",
    "farmer",
    "keeper",
    "miller",
    "painter",
    "pilot",
    "printer",
    "smith",
    "tailor",
    "weaver",
)

# No chunk begins with a name: a name always follows a space, so it always has the same tokens.
OPENINGS: tuple[str, ...] = (
    "By all accounts,",
    "In the old letters,",
    "As people say,",
    "In the town records,",
)
UPDATE_OPENINGS: tuple[str, ...] = ("Since last spring,", "After the flood,")


@dataclass(frozen=True)
class Grammar:
    """How varied the text is; a training curriculum grows it, the benchmark uses the default.

    Attributes
    ----------
    wordings
        How many of each relation's wordings are used (1 or 2).
    facts_per_chunk
        Smallest and largest number of sentences in a chunk.
    pronoun_share
        Share of a chunk's later sentences that use a pronoun in place of the trade.
    name_share
        Share of the others that name the person again, if the chunk is no continuation.
    relations_per_context
        How many relations the documents of one question draw from; few, so that the
        relation alone never tells the answer.
    continuation_share
        How often a context has continuations at all.
    orphan_share
        How often one continuation of a context of three chunks or more lacks its
        predecessor.
    shared_trade_share
        How often two persons of one context have the same trade.
    link_share
        How many person-valued facts of an intro name another person of the context, as long
        as there is one that no other fact of it names; two hops start from these.
    confusable_share
        How many two-hop questions are left out of those that can be answered without heeding
        the first relation: no other person whom the subject's intro names has the second.
    """

    wordings: int = 2
    facts_per_chunk: tuple[int, int] = (4, 5)
    pronoun_share: float = 0.2
    name_share: float = 0.6
    relations_per_context: int = 9
    continuation_share: float = 1.0
    orphan_share: float = 0.2
    shared_trade_share: float = 0.7
    link_share: float = 0.8
    confusable_share: float = 0.0
