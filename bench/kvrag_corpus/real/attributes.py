"""What can be said about a person or a firm: wordings, a question, and values of one kind."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag_corpus.real import words


@dataclass(frozen=True)
class Attribute:
    """One kind of fact.

    Attributes
    ----------
    name
        Label, unique.
    values
        What it may be. Attributes that share a list never share a value in one prompt.
    statements
        Sentences with ``{who}`` (the person or firm), ``{their}`` and ``{value}``.
    question
        A question with ``{who}``.
    """

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    question: str


OF_PEOPLE: tuple[Attribute, ...] = (
    Attribute(
        "birthplace",
        words.TOWNS,
        (
            "{who} was born in {value}.",
            "{who} was born in {value}, the youngest of five children.",
            "{who} was born in a small flat in {value}.",
        ),
        "In which city was {who} born?",
    ),
    Attribute(
        "birth year",
        words.YEARS,
        (
            "{who} was born in the year {value}.",
            "{their} passport gives {value} as the year of birth.",
            "The year in which {who} was born is {value}.",
        ),
        "In which year was {who} born?",
    ),
    Attribute(
        "profession",
        words.PROFESSIONS,
        (
            "{their} profession is that of a trained {value}.",
            "{who} earns {their} living as a skilled {value}.",
            "{who} is a qualified {value} and likes the profession.",
        ),
        "What is the profession of {who}?",
    ),
    Attribute(
        "employer",
        words.FIRMS,
        (
            "{their} employer is {value}.",
            "For many years {who} has worked for {value}.",
            "{who} works for {value}, where the hours are long but the pay is good.",
        ),
        "Which company does {who} work for?",
    ),
    Attribute(
        "home",
        words.TOWNS,
        (
            "Today {who} lives in {value}.",
            "{who} now lives in {value}, close to the railway station.",
            "Since last spring {who} has lived in a rented house in {value}.",
        ),
        "In which city does {who} live today?",
    ),
    Attribute(
        "spouse",
        words.SPOUSES,
        (
            "{who} is married to {value}.",
            "{who} has been married to {value} for twelve years.",
            "{who} met {value} on a train, and the two are married.",
        ),
        "Who is {who} married to?",
    ),
    Attribute(
        "instrument",
        words.INSTRUMENTS,
        (
            "In the evenings {who} plays the {value}.",
            "{who} plays the {value} in an amateur orchestra.",
            "The instrument {who} plays is the {value}.",
        ),
        "Which musical instrument does {who} play?",
    ),
    Attribute(
        "pet",
        words.PETS,
        (
            "{who} has a cat named {value}.",
            "{their} cat is named {value}.",
            "{who} shares the house with a grey cat named {value}.",
        ),
        "What is the name of {who}'s cat?",
    ),
    Attribute(
        "hobby",
        words.HOBBIES,
        (
            "The hobby that {who} chose is {value}.",
            "At weekends {who} has time for {value}, {their} only hobby.",
            "{their} hobby is {value}.",
        ),
        "What is the hobby of {who}?",
    ),
    Attribute(
        "dish",
        words.DISHES,
        (
            "{their} favourite dish is {value}.",
            "Friends know that {their} favourite dish is {value}.",
            "When guests come, {who} cooks {their} favourite dish, which is {value}.",
        ),
        "What is the favourite dish of {who}?",
    ),
    Attribute(
        "subject",
        words.SUBJECTS,
        (
            "At university {who} studied {value}.",
            "{who} studied {value} and finished with good marks.",
            "{who} studied {value}, against the advice of all {their} teachers.",
        ),
        "Which subject did {who} study?",
    ),
    Attribute(
        "language",
        words.LANGUAGES,
        (
            "{who} is learning {value}.",
            "On Tuesday evenings {who} is learning {value} with a private teacher.",
            "The language {who} is learning is {value}.",
        ),
        "Which language is {who} learning?",
    ),
    Attribute(
        "book",
        words.BOOKS,
        (
            "{who} once wrote a novel with the title {value}.",
            "The only novel {who} wrote has the title {value}.",
            "{their} first novel has the title {value}.",
        ),
        "Which novel did {who} write?",
    ),
    Attribute(
        "allergy",
        words.ALLERGENS,
        (
            "{who} is allergic to {value}.",
            "Since childhood {who} has been allergic to {value}.",
            "{their} doctor says that {who} is allergic to {value}.",
        ),
        "What is {who} allergic to?",
    ),
)

OF_FIRMS: tuple[Attribute, ...] = (
    Attribute(
        "seat",
        words.TOWNS,
        (
            "{who} has its head office in {value}.",
            "The head office of {who} is in {value}.",
            "{their} head office was moved to {value} two years ago.",
        ),
        "In which city is the head office of {who}?",
    ),
    Attribute(
        "street",
        words.STREETS,
        (
            "Visitors find the showroom of {who} in {value}.",
            "{their} showroom is in {value}.",
            "{who} opened a showroom in {value}.",
        ),
        "In which street is the showroom of {who}?",
    ),
    Attribute(
        "year",
        words.YEARS,
        (
            "{who} was founded in {value}.",
            "{who} was founded in {value} with borrowed money.",
            "The year in which {who} was founded was {value}.",
        ),
        "In which year was {who} founded?",
    ),
    Attribute(
        "product",
        words.PRODUCTS,
        (
            "{who} is best known for its {value}.",
            "Most of {their} income comes from {value}, for which {who} is best known.",
            "Abroad, {who} is best known for {value}.",
        ),
        "Which product is {who} best known for?",
    ),
    Attribute(
        "headcount",
        words.HEADCOUNTS,
        (
            "{who} employs {value} people.",
            "At the last count {who} employed {value} people.",
            "{their} staff has grown, and today {who} employs {value} people.",
        ),
        "How many people does {who} employ?",
    ),
    Attribute(
        "animal",
        words.ANIMALS,
        (
            "The animal in {their} logo is a smiling {value}.",
            "The logo of {who} shows a sleeping {value}.",
            "On the roof stands the animal of {their} logo, a big {value}.",
        ),
        "Which animal is in the logo of {who}?",
    ),
    Attribute(
        "vans",
        words.COLOURS,
        (
            "The delivery vans of {who} are painted {value}.",
            "All of {their} delivery vans are {value}.",
            "{who} has delivery vans, and every one of them is {value}.",
        ),
        "What colour are the delivery vans of {who}?",
    ),
    Attribute(
        "material",
        words.MATERIALS,
        (
            "The floor of {their} entrance hall is made of {value}.",
            "In the entrance hall of {who} the floor is made of {value}.",
            "{who} has an entrance hall with a floor that is made of {value}.",
        ),
        "What is the floor of the entrance hall of {who} made of?",
    ),
    Attribute(
        "lunch",
        words.DISHES,
        (
            "On Fridays the canteen of {who} serves {value}.",
            "{their} canteen serves {value} on Fridays.",
            "Everybody looks forward to Friday, when {their} canteen serves {value}.",
        ),
        "What does the canteen of {who} serve on Fridays?",
    ),
    Attribute(
        "sport",
        words.HOBBIES,
        (
            "{who} pays for a club in which the staff can try {value}.",
            "The club of {their} staff is devoted to {value}.",
            "After work the staff of {who} meet in a club for {value}.",
        ),
        "What is the club of the staff of {who} devoted to?",
    ),
)

ASIDES_OF_PEOPLE = (
    "{who} likes to talk about all this over a cup of tea.",
    "Neighbours describe a friendly person who is never late.",
    "{who} gets up early and hardly ever watches television.",
    "In summer the windows are always open, and visitors are welcome.",
    "Nobody can remember {their} last quarrel with anyone.",
    "{who} keeps old letters in a wooden box under the bed.",
    "A long walk after dinner is part of every day.",
    "{who} never learned to drive and sees no reason to do so.",
    "{their} handwriting is so small that only close friends can read it.",
    "{who} answers every letter on the day it comes.",
)
"""Sentences about anybody, which make a text longer and no richer."""

ASIDES_OF_FIRMS = (
    "Guests are offered a cup of tea and a comfortable chair.",
    "{who} answers every letter within a week.",
    "The telephone rings from morning to night, and somebody always picks it up.",
    "Once a year {who} opens its doors to the public for a whole weekend.",
    "Prices have hardly changed, which surprises even old customers.",
    "{who} has never missed a delivery, not even in deep snow.",
    "Trainees are taken on every September and most of them stay.",
    "Those who retire are given a clock and a long speech.",
    "{who} pays its bills early and expects the same of others.",
    "There were plans for a second building, but they came to nothing.",
)
"""Sentences about any firm."""
