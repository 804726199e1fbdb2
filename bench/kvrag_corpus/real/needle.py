"""Needle: a code word or a number for a city, in long prose about other things."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from kvrag_corpus.real.asked import NUM_CHOICES, Asked, draw_choices
from kvrag_corpus.real.words import CODE_WORDS, TOWNS

_WORDS_PER_TOKEN = 0.7
"""Words for each token of English prose, with the tokenizers of small models."""


def needles(num_keys: int, num_tokens: int, prose: Sequence[str], seed: int) -> Iterator[Asked]:
    """Yield questions for the code word or the number of a city.

    Parameters
    ----------
    num_keys
        Cities in a prompt that have one, each in a separate chunk.
    num_tokens
        About how long the chunks are together.
    prose
        Chunks of other text, drawn for each prompt.
    seed
        The same seed gives the same questions.

    Raises
    ------
    ValueError
        When `prose` is shorter than the prompts.
    """
    wanted = int(num_tokens * _WORDS_PER_TOKEN)
    there = sum(len(text.split()) for text in prose)
    if there < wanted:
        raise ValueError(f"{num_tokens} tokens need {wanted} words of prose, and there are {there}")
    rng = Random(f"needle {num_keys} {num_tokens} {seed}")
    while True:
        chunks = _draw(prose, wanted, rng)
        everything = " ".join(chunks).casefold()
        towns = [town for town in TOWNS if town.casefold() not in everything]
        if rng.random() < 0.5:
            kind = "code word"
            values = [word for word in CODE_WORDS if word not in everything]
        else:
            kind = "secret number"
            values = [str(rng.randrange(10_000, 100_000)) for _ in range(2 * NUM_CHOICES)]
        towns, keys = rng.sample(towns, num_keys), rng.sample(values, num_keys)
        places = rng.sample(range(len(chunks)), num_keys)
        for town, key, place in zip(towns, keys, places, strict=True):
            chunks[place] = _hide(f"The {kind} for {town} is {key}.", chunks[place], rng)
        yield Asked(
            question=f"What is the {kind} for {towns[0]}?",
            answers=(keys[0],),
            chunks=tuple(chunks),
            supporting=(places[0],),
            choices=draw_choices(keys[0], keys, values, rng),
        )


def _draw(prose: Sequence[str], num_words: int, rng: Random) -> list[str]:
    chunks: list[str] = []
    for text in rng.sample(prose, len(prose)):
        num_words -= len(text.split())
        if num_words < 0:
            break
        chunks.append(text)
    return chunks


def _hide(sentence: str, text: str, rng: Random) -> str:
    """Put a sentence between two of a text, or at its beginning."""
    sentences = text.split(". ")
    place = rng.randrange(len(sentences))
    before = ". ".join(sentences[:place])
    return f"{before + '. ' if place else ''}{sentence} {'. '.join(sentences[place:])}"
