"""PyTorch without its operators in Python for tensors that hold no numbers, until they are needed.

They take a quarter of ``import torch``, and answers need none. Transformers makes models of such
tensors, compilers trace with them, and other people's code may do either: before it is imported,
`need` is called. Versions of PyTorch that nobody has tried this with are imported as they are.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any

_TRIED = ("2.13.",)
_NAME = "torch._meta_registrations"
_NEED = ("transformers", "torch._dynamo")
_lock = RLock()


def postpone() -> None:
    """Leave them out of ``import torch`` in this process, until `need` is called."""
    if not {"torch", *_NEED} & sys.modules.keys() and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def need() -> None:
    """Import them, or let ``import torch`` do so."""
    with _lock:
        if _Finder in sys.meta_path:
            sys.meta_path.remove(_Finder)
        module = sys.modules.get(_NAME)
        if module is not None and isinstance(module.__loader__, _Later):
            module.__loader__.load(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in _NEED:
            need()
        if name != _NAME or not sys.modules["torch"].__version__.startswith(_TRIED):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Leaves a module empty until `load`, or until something of it is asked for."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        import torch
        from torch._opaque_base import OpaqueBaseMeta

        def attribute(name: str) -> Any:
            if not name.startswith("__"):
                need()  # or wait for the thread that does
            if name not in vars(module):
                raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
            return vars(module)[name]

        module.__getattr__ = attribute  # type: ignore[method-assign]
        # What is left out would do so; without it, no generator can be made.
        torch._C._set_generator_metaclass(OpaqueBaseMeta)

    def load(self, module: ModuleType) -> None:
        """Fill the module."""
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        del module.__getattr__
