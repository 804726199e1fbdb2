"""The measurements of an index's model (`kvrag calibrate`), kept in the index folder."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.errors import IndexFormatError, IndexMismatchError, StoreError
from kvrag.ingest.config import write_atomically
from kvrag.ingest.storage import Storage
from kvrag.regularfile import read_regular
from kvrag.store.files import store_error
from kvrag.store.registry import without_password

if TYPE_CHECKING:
    from kvrag.fusion.calibration import Calibration

FILE_NAME = "calibration.json"


def read_calibration(storage: Storage) -> Calibration | None:
    """Return the stored measurements (`Index.calibration`)."""
    storage.require_open()
    path = storage.path / FILE_NAME
    try:
        text = read_regular(path).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    from kvrag.fusion.calibration import Calibration

    found = Calibration.from_json(text, str(path))
    if found.model_fingerprint != storage.config.model_fingerprint:
        raise IndexMismatchError(
            f"{path}: measured with another model than the index's; run 'kvrag calibrate' again"
        )
    if found.loading is not None and found.loading.store != without_password(storage.store.url):
        # A calibration of another store says nothing about this one.
        found = replace(found, loading=None)
    return found


def calibration_problem(storage: Storage, *, repair: bool) -> str:
    """Return what is wrong with the stored measurements, or "".

    Parameters
    ----------
    repair
        Set a damaged file aside: only ``kvrag calibrate`` can measure again.
    """
    try:
        read_calibration(storage)
    except (IndexFormatError, IndexMismatchError, StoreError) as error:
        path = storage.path / FILE_NAME
        if repair:
            try:
                path.replace(path.with_name(f"{FILE_NAME}.damaged"))
            except OSError as refusal:
                raise store_error("set aside", path, refusal) from refusal
        return str(error)
    return ""


def check_can_keep(folder: Path) -> None:
    """Raise StoreError if an index folder takes no measurements, before they take minutes."""
    path = folder / FILE_NAME
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise store_error("write", path, error) from error


def keep_calibration(storage: Storage, calibration: Calibration) -> None:
    """Store measurements in place of the old ones (`Upkeep.keep_calibration`)."""
    if calibration.model_fingerprint != storage.config.model_fingerprint:
        raise IndexMismatchError(
            f"{storage.path}: the calibration was measured with another model than the index's"
        )
    write_atomically(storage.path / FILE_NAME, calibration.to_json().encode())
