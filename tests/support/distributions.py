"""Third-party distributions, installed for a test."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrag.codec.names import PLAIN
from kvrag.fusion.policies.registry import POLICIES
from kvrag.store.registry import REMOTE


@contextmanager
def installed(
    folder: Path, name: str, module: str, entry_points: Mapping[str, str]
) -> Iterator[None]:
    """Put a distribution of one module on the path, as pip would unpack it into site-packages.

    Parameters
    ----------
    name
        The name of the distribution and of its module.
    module
        The module's source.
    entry_points
        ``MODULE:CLASS`` by ``GROUP: NAME``.
    """
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(module)
    metadata = folder / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    lines = []
    for place, value in entry_points.items():
        group, _, entry = place.partition(": ")
        lines.append(f"[{group}]\n{entry} = {value}\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for known in (PLAIN, POLICIES, REMOTE):  # afterwards, it is not known any more
            patch.setattr(known, "_registered", dict(known._registered))
        try:
            yield
        finally:
            sys.modules.pop(name, None)
