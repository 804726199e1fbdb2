from tests.support.rag import rag

__all__ = ["rag"]
