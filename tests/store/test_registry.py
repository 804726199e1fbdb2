import sys
from pathlib import Path

import pytest

from kvrag.errors import KVRagError, ParameterError, StoreError
from kvrag.store.registry import open_store
from kvrag_testing.store_contract import key_number
from tests.support.folders import key_file


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for place in (f"{tmp_path}/kv", f"//{tmp_path}/kv", f"////{tmp_path}/kv", "~/kv"):
        assert open_store(f"file:{place}").url == f"file:{tmp_path}/kv"
    store = open_store("file:a b/c%20d")
    monkeypatch.chdir("/")
    store.put(key_number(0), b"record")
    assert store.url == f"file:{tmp_path}/a b/c%20d"
    assert len(list((tmp_path / "a b" / "c%20d").rglob("*.kv"))) == 1
    assert open_store(store.url).contains(key_number(0))


@pytest.mark.parametrize("name", ["who?", "who?a=b/c", "who? me"])
def test_a_question_mark_in_a_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Read as a part of the name, it would hide options, such as a key's."""
    with pytest.raises(ParameterError, match=r"limit, key_file"):
        open_store(f"file:{tmp_path / name}")
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ParameterError, match=r"no URL can name this folder; use another one"):
        open_store("file:kv")
    assert not list((tmp_path / name).iterdir())


@pytest.mark.parametrize(
    "rest",
    [
        *("?keyfile=KEY", "?key-file=KEY", "?Key_file=KEY", "?KEY_FILE=KEY", "? key_file=KEY"),
        *("?key_fil=KEY", "?key=KEY", "?key_file", "?key_file:KEY", "?key_file=", "??key_file=KEY"),
        *("?limit=1GB;key_file=KEY", "?limit=1GB?key_file=KEY", "?limit=1GB&keyfile=KEY"),
        *("&key_file=KEY", "#key_file=KEY", ";keyfile=KEY", "|key_file=KEY", " key=KEY"),
        *("/key_file=KEY", ":key_file=KEY", "%3Fkey_file=KEY", f"/{'a/' * 150}b&key_file=KEY"),
    ],
)
def test_a_key_is_never_lost_by_a_wrong_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    monkeypatch.chdir(tmp_path)
    key = key_file(tmp_path / "key")
    remote = ("redis://u:secret@h/0", "s3://b/p", "http://h:1", "https://h/a")
    for place in ("file:d", "memory:", *remote):
        for url in (place, f"tiered:memory:|{place}"):
            with pytest.raises(ParameterError) as failure:
                open_store(url + rest.replace("KEY", str(key)), must_answer=False)
            assert "secret" not in str(failure.value)
    assert list(tmp_path.iterdir()) == [key]


def test_a_folder_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(StoreError, match=r"cannot use .*: Permission denied; permission"):
        open_store(f"file:{tmp_path}")


@pytest.mark.parametrize(
    "url",
    ["", "file", "file:", "file://host/x", "memory", "memory:x", "/tmp/x", "s3:bucket", ":", "x:y"],
)
def test_other_urls(url: str) -> None:
    with pytest.raises(ParameterError, match=r"file:PATH, file:///PATH, memory:, redis:.*; found"):
        open_store(url)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a folder; a file is where a folder should be"):
        open_store(f"file:{tmp_path / 'file'}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://u:secret@host/0?size=3", "has no option 'size'; it has prefix, timeout"),
        ("redis://u:secret@host/0?timeout=soon", "seconds above 0, found 'soon'"),
        (
            "redis://u:secret@host/0?prefix=a;key_file=b",
            "timeout, limit, key_file; found a",
        ),
        ("redis://u:secret@host/0?timeout=0", "seconds above 0, found '0'"),
        ("redis://u:secret@host/0?prefix", "options are NAME=VALUE, .*: prefix, timeout"),
        ("redis://u:secret@host/0?timeout=1&timeout=2", "timeout is given twice"),
        ("redis://u:secret@host/first", "no number of a database|of a password are written"),
        ("tiered:file:/a?limit=1GB|file:/a", "file:/a is two of the tiers"),
        ("tiered:memory:|file:/a|file:/b|file:/a/", "file:/a is two of the tiers"),
        ("s3://bucket?prefix=x", "has no option 'prefix'; it has endpoint"),
        ("file:/a?limt=1GB", "file:/a has no option 'limt'; it has limit, key_file"),
        ("file:a?timeout=3&limit=1GB", "file:a has no option 'timeout'"),
        ("memory:?limt=1GB", "memory: has no option 'limt'"),
        ("ftp://u:secret@host/", r"found 'ftp://u:\*\*\*@host/'"),
    ],
)
def test_bad_options(url: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as failure:
        open_store(url)
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:sec/ret@host/0",
        "redis://:sec@ret@host/0?limit=0",
        "redis://u:sec#ret@host/0",
        "redis://u:sec?ret@host/0",
        "tiered:redis://u:sec/ret@host/0|x:y",
        "x://u:sec/ret@host",
    ],
)
def test_no_part_of_a_password_is_told(url: str) -> None:
    with pytest.raises(KVRagError) as failure:
        open_store(url)
    assert "sec" not in str(failure.value).replace("seconds", "")
    assert "ret" not in str(failure.value)


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [("redis://host/0", "redis", "redis"), ("s3://bucket", "obstore", "objects")],
)
def test_a_library_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, url: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ParameterError, match=rf"needs the library '{library}'.*kvrag\[{extra}\]"):
        open_store(url)
