import asyncio
import inspect
from collections.abc import Iterator

import pytest

from tests.support.rag import rag

__all__ = ["rag"]


@pytest.fixture
def own_event_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """For synchronous calls of LlamaIndex.

    It counts tokens on the thread's event loop; where there is none it makes one and leaves it
    open, which Python reports whenever it is collected, in the middle of some other test.
    """
    if inspect.iscoroutinefunction(request.function):
        yield
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()
