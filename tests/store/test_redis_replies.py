"""Replies damaged on their way: a typed error, whatever the client's parser makes of it."""

import pytest

from kvrag.errors import RecordError, StoreError
from kvrag.store.redis import RedisStore


@pytest.mark.parametrize("error", [ValueError("b'100\\x1032'"), TypeError("x"), IndexError("x")])
def test_what_the_parser_lets_through_is_a_store_error(error: Exception) -> None:
    store = RedisStore("redis://127.0.0.1:1/0", must_answer=False)
    with pytest.raises(StoreError, match="no reply of Redis"), store._errors("read"):
        raise error


def test_errors_of_ours_stay_what_they_are() -> None:
    store = RedisStore("redis://127.0.0.1:1/0", must_answer=False)
    with pytest.raises(RecordError, match="damaged"), store._errors("read"):
        raise RecordError("damaged")
