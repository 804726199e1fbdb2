"""The names of KV: what goes into them, and that nothing else passes for it."""

from collections.abc import Mapping, Sequence

import pytest

from kvrag.chunk import ContextIds, chunk_key
from kvrag.errors import ParameterError


def key(context_ids: Sequence[int] = (), options: Mapping[str, str] | None = None) -> str:
    return chunk_key(
        tenant_salt=b"salt",
        model_fingerprint="model",
        tokenizer_fingerprint="tokenizer",
        prefix_ids=(0,),
        token_ids=(5, 6),
        context_ids=context_ids,
        options=options,
    ).digest


def test_names_stay_what_they_were() -> None:
    assert key() == "85d0fc47d06e1ffd34ddc5d20ec9f9a44d5dc6ce"
    assert key((65,)) == "13efd09d3a07effb6a8ff780fdf696d6cb6240fc"


def test_no_option_passes_for_a_context() -> None:
    # Once the eight bytes of token 65: the key was that of `key((65,))`.
    with pytest.raises(ParameterError, match="'context' is reserved for context_ids"):
        key(options={"context": "A" + 7 * "\0"})
    with pytest.raises(ParameterError, match="use another one"):
        key((1,), {"context": "x"})
    assert len({key(), key((65,)), key(options={"compression": "drop"})}) == 3


def test_a_context_is_found_by_the_tuple_that_it_equals() -> None:
    ids = ContextIds(range(500))
    assert {ids: 1} | {tuple(range(500)): 2} == {tuple(ids): 2}
    assert hash(ids) == hash(ids) == hash(tuple(ids))
    assert {ContextIds(): 1}[()] == 1
