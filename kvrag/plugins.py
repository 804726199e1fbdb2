"""Classes by name, kvrag's own and other distributions'; and failures of foreign code.

Another distribution registers a name with an entry point in one of these groups:

- ``kvrag.stores``: the scheme of a URL, naming a subclass of `kvrag.store.remote.RemoteStore`;
- ``kvrag.policies``: a policy, naming a subclass of `kvrag.fusion.policies.base.RecomputePolicy`;
- ``kvrag.codecs``: a codec without a profile, naming a class that takes no arguments and has the
  protocol `kvrag.codec.base.Codec`.

kvrag looks there only for names that it does not define itself, so its own cannot be replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from kvrag import metakernels
from kvrag.errors import DocumentError, KVRagError, ParameterError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """A mapping from names to classes. Each class is imported on first use.

    Parameters
    ----------
    group
        The group of entry points where other distributions register their classes.
    built_in
        kvrag's own classes: name to ``module:class``, the notation of entry points. Those of
        ``kvrag_testing`` are listed where that is installed.
    """

    def __init__(self, group: str, built_in: Mapping[str, str]) -> None:
        self.group = group
        self.built_in = built_in
        self._registered: dict[str, EntryPoint] = {}

    def __getitem__(self, name: str) -> T:
        """Return the class with a name.

        Raises
        ------
        KeyError
            If no class has that name.
        ParameterError
            If several distributions register the name, or the class cannot be imported.
        """
        if name in self.built_in:
            found: T = loaded(self.built_in[name])
            return found
        point = self._find(name)
        if point is None:
            raise KeyError(name)
        metakernels.need()
        try:
            found = point.load()
        except Exception as error:
            self.refuse(
                name, "a class that can be imported", f"{type(error).__name__}: {error}", error
            )
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.built_in or self._find(name) is not None)

    def __iter__(self) -> Iterator[str]:
        absent = _TESTING if find_spec(_TESTING) is None else None
        yield from (
            one for one, place in self.built_in.items() if place.partition(".")[0] != absent
        )
        others = {point.name for point in registered(self.group)}
        yield from sorted(others - self.built_in.keys())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def refuse(
        self, name: str, expected: str, found: str, cause: Exception | None = None
    ) -> NoReturn:
        """Raise ParameterError: the entry point of a name is not what it should be."""
        point = self._find(name)
        place = f"{self.group}: {name}" if point is None else described(point)
        raise ParameterError(
            f"entry point {place}: expected {expected}, found {found}; mend that distribution, or "
            "uninstall it"
        ) from cause

    def _find(self, name: str) -> EntryPoint | None:
        """Return the entry point of a name. Raises ParameterError if there are several."""
        if name not in self._registered:
            points = {point.value: point for point in registered(self.group) if point.name == name}
            if len(points) > 1:
                raise ParameterError(
                    f"{name!r} is registered by several distributions, "
                    f"{' and '.join(map(described, points.values()))}: uninstall all but one"
                )
            if not points:
                return None
            self._registered[name] = points.popitem()[1]
        return self._registered[name]


_TESTING = "kvrag_testing"


def loaded(place: str) -> Any:
    """Import ``module:name``. Raise ParameterError if that is of kvrag-bench, which is missing."""
    module, _, name = place.partition(":")
    is_ours = not module.startswith(_TESTING)
    return getattr(import_module(module) if is_ours else require(module, "bench"), name)


def registered(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, from all installed distributions."""
    from importlib.metadata import entry_points  # most runs need none

    return list(entry_points(group=group))


def described(point: EntryPoint) -> str:
    """Return an entry point for messages: ``kvrag.stores: lake = lake_kv:LakeStore of lake-kv``."""
    owner = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    return f"'{point.group}: {point.name} = {point.value}'{owner}"


def require_subclass(table: Table[Any], name: str, found: object, base: type[Any]) -> None:
    """Raise ParameterError unless `found`, the entry `name` of a table, is a subclass of `base`."""
    if not (isinstance(found, type) and issubclass(found, base)):
        table.refuse(name, f"a subclass of {base.__module__}.{base.__qualname__}", repr(found))


def require(module: str, extra: str) -> Any:
    """Import a library of an extra. Raises ParameterError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ParameterError(
            f"this needs the library {module.partition('.')[0]!r}, which is not installed: "
            f"pip install 'kvrag[{extra}]'"
        ) from error


def reason(error: BaseException) -> str:
    """Return what a library says about foreign input; raise `error` if it is not the library's.

    Parsers raise whatever the bytes lead to, and a panic in a Rust library (tokenizers) is not even
    an `Exception`.
    """
    is_panic = type(error).__name__ == "PanicException"
    if isinstance(error, KVRagError) or not (isinstance(error, Exception) or is_panic):
        raise error
    return told(error)


def told(error: BaseException) -> str:
    """Return an error's kind and message."""
    with contextlib.suppress(Exception):  # the error's message may itself fail
        return f"{type(error).__name__}: {str(error)[:1000] or 'no message was given'}"
    return type(error).__name__


@contextlib.contextmanager
def document_failures(fail: Callable[[str], None]) -> Iterator[None]:
    """Pass any error that a document causes inside to `fail`, as a reason.

    Errors of the store, the disk, the catalog or the model have specific types. They are raised:
    every later document would fail too.
    """
    try:
        yield
    except DocumentError as error:
        fail(str(error))
    except BaseException as error:
        fail(reason(error))
