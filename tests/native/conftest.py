"""Every instruction set of this processor, one after the other."""

from tests.support.instructions import isa

__all__ = ["isa"]
