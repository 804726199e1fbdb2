"""What processes of a shared index do to each other if one of them stands still for a while."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrag.chunk import Document
from kvrag.errors import IndexFormatError, ModelLoadError, StoreError
from kvrag.ingest import stages
from kvrag.ingest.index import Index
from kvrag.ingest.shared import log as logs
from kvrag.ingest.shared import manifest
from kvrag.ingest.shared.manifest import Log
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import Machine
from tests.ingest.test_shared import page, sources


def long_page(number: int) -> Document:
    words = " ".join(f"w{(number * k) % 97}" for k in range(700))
    return Document(f"d{number}", f"Page {number}. {words}")


def log_of(index: Any) -> logs.SharedLog:
    found: logs.SharedLog = index._storage.log
    return found


def after_first(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, own: object, act: Callable[[], object]
) -> list[object]:
    """Let something happen right after the first call of an object's method; return those calls."""
    method = getattr(kind, name)
    calls: list[object] = []

    def called(self: object, *given: Any) -> Any:
        found = method(self, *given)
        if self is own and not calls:
            calls.append(self)
            act()
        return found

    monkeypatch.setattr(kind, name, called)
    return calls


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_change_that_others_have_built_on_is_not_made_twice(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    sleeper, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    sleeper.add([page(0)])
    sleeper.upkeep.gc()

    def meanwhile() -> None:
        if is_deleted:
            other.delete(sources=["d1"])
        else:
            other.add([Document("d1", "The corrected text of page one. " * 5)])
        for number in range(20, 23):  # each is followed by a new base
            other.add([long_page(number)])
            other.upkeep.gc()

    slept = after_first(monkeypatch, Log, "create", log_of(sleeper)._log, meanwhile)
    sleeper.add([page(1)])
    assert slept
    for index in (sleeper, other, machine("newcomer", folder_url)):
        index.refresh()
        texts = [one.text for one in index.catalog.chunks(index.catalog.chunk_ids_of("d1"))]
        assert "".join(texts).startswith("The corrected") is not is_deleted
        assert sources(index) == {"d0", "d20", "d21", "d22", *([] if is_deleted else ["d1"])}


def test_a_writer_that_slept_too_long_says_so(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    sleeper.add([page(0)])
    monkeypatch.setattr(manifest, "VERSIONS_SECONDS", 0.0)

    def meanwhile() -> None:
        for number in range(20, 23):
            other.add([long_page(number)])
            other.upkeep.gc(grace_seconds=0)

    slept = after_first(monkeypatch, Log, "create", log_of(sleeper)._log, meanwhile)
    with pytest.raises(StoreError, match="no longer says whether version 2 is its own"):
        sleeper.add([page(1)])
    assert slept
    assert sleeper.add([page(1)]).unchanged == ("d1",)


def test_a_log_that_lacks_a_change_is_not_followed(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one", folder_url, context="none")
    one.add([page(0)])
    one.upkeep.gc()
    one.add([page(1)])
    log = log_of(one)
    log._commit(None, lambda now: replace(now, deltas=now.deltas[-1:]))
    with pytest.raises(IndexFormatError, match="lacks a change between its versions"):
        machine("newcomer", folder_url)


def test_a_segment_that_is_named_again_while_it_is_removed(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    one.add([page(0)])
    one.upkeep.gc()
    former = log_of(one)._current()
    one.add([long_page(1)])
    one.upkeep.gc()
    needed = other.upkeep._needed_keys
    left = [1]

    def early() -> set[str]:
        digests = needed()
        if left:
            left.clear()  # a writer that slept since the base before names that again
            log_of(one)._commit(None, lambda now: replace(now, base=former.base))
        return digests

    monkeypatch.setattr(other.upkeep, "_needed_keys", early)
    other.upkeep.gc(grace_seconds=0)
    assert not left
    assert sources(machine("newcomer", folder_url)) == {"d0", "d1"}


def test_an_ingestion_that_fails_restores_what_it_had_relied_on(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    one.add([page(0), page(1)])
    one.delete(sources=["d1"])
    commit = logs.SharedLog.commit
    commits = []

    def late(log: logs.SharedLog, change: Any) -> None:
        if log is log_of(one):
            commits.append(change)
            if len(commits) == 1:
                assert other.upkeep.gc(grace_seconds=0).num_records == 1
            if len(commits) == 2:
                raise StoreError("the bucket does not answer")
        commit(log, change)

    monkeypatch.setattr(logs.SharedLog, "commit", late)
    monkeypatch.setattr(stages, "COMMIT_TOKENS", 1)
    with pytest.raises(StoreError, match="does not answer"):
        one.add([page(1), page(2)])
    assert sources(one) == {"d0", "d1"}
    assert one.upkeep.verify().ok


def test_a_gc_that_cannot_compute_what_is_needed_again_says_so(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    one.add([page(0), page(1), page(2)])
    one.delete(sources=["d1", "d2"])
    needed = other.upkeep._needed_keys

    def early() -> set[str]:
        digests = needed()
        if len(one.documents()) == 1:
            one.add([page(1), page(2)])
        return digests

    def without_model(key: Any) -> None:
        raise ModelLoadError("there is no model here")

    monkeypatch.setattr(other.upkeep, "_needed_keys", early)
    monkeypatch.setattr(other.upkeep._fitter, "repair", without_model)
    with pytest.raises(StoreError, match=r"^2 removed records .*no model here.*verify --repair"):
        other.upkeep.gc(grace_seconds=0)
    assert log_of(one)._log.collecting().startswith("over")
    one.refresh()
    assert not one.upkeep.verify().ok
    assert one.upkeep.verify(repair=True).ok


def test_a_dry_run_beside_an_ingestion_forgets_no_doubt(machine: Machine, folder_url: str) -> None:
    one = machine("one", folder_url, context="none")
    log = log_of(one)
    log.begin()
    log._log.note_collecting("over")
    before = log._collecting
    one.add([page(0)], dry_run=True)
    assert log._collecting == before != log._log.collecting()


def test_a_tier_of_one_machine_is_no_place_for_others(
    machine: Machine, folder_url: str, tmp_path: Path, model: KVModel
) -> None:
    one = machine("one", folder_url, context="none")
    one.add([page(0), page(1)])
    tiers = f"tiered:file:{tmp_path}/cache|{one.config.store}"
    with Index.open(folder_url, model=model, store=tiers) as cached:
        kv = cached.open_kv(cached.catalog.chunk_ids_of("d1")[0])
        first = cached.open_kv(cached.catalog.chunk_ids_of("d0")[0])
        for layer in range(model.spec.num_layers):
            kv.read_layer(layer)
            first.read_layer(layer)

        home = cached._storage.home
        one.delete(sources=["d1"])
        one.upkeep.gc(grace_seconds=0)
        assert cached.add([page(1), page(2)]).num_records == 2
        lost = cached._storage.config.key_of(
            cached.catalog.chunks(cached.catalog.chunk_ids_of("d0"))[0]
        )
        home.delete(lost)
        assert cached._storage.store.contains(lost)
        assert not cached.upkeep.verify().ok
        assert cached.upkeep.verify(repair=True).ok
        assert home.contains(lost)
        assert {key.digest for key, _ in home.sizes()} == cached.upkeep._needed_keys()
    one.refresh()
    assert one.upkeep.verify().ok


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_base_that_others_have_overtaken_before_its_commit(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    sleeper, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    sleeper.add([page(0)])
    expected = {"d0"} if is_removed else {"d0", "d1", "d2", "d3"}
    if not is_removed:
        sleeper.upkeep.gc()

    def meanwhile() -> None:
        for number in (1, 2, 3):
            if not is_removed:
                other.add([page(number)])
            other.upkeep.gc(grace_seconds=0 if is_removed else 3600)

    slept = after_first(monkeypatch, logs.SharedLog, "_put_base", log_of(sleeper), meanwhile)
    if is_removed:
        log_of(sleeper).compact(is_forced=True)
    else:
        log_of(sleeper).mend()  # leaves no hole in the changes
    assert slept
    for index in (sleeper, other, machine("newcomer", folder_url)):
        index.refresh()
        assert sources(index) == expected
        assert index.upkeep.verify().ok
