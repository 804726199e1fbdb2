"""Every instruction set of this processor, one after the other."""

from tests.support.instructions import isa_of_few

__all__ = ["isa_of_few"]
