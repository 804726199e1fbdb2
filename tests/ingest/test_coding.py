"""Codecs of an index: fitting at the first ingestion, recoding, what is missing or foreign."""

from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.errors import IndexFormatError, ParameterError, ProfileError, RecordError
from kvrag.ingest.coding import read_all
from kvrag.ingest.index import Index
from kvrag.ingest.profiles import read_profile
from kvrag.ingest.report import IngestProgress
from kvrag.kvcache import ChunkKV
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import MakeIndex
from tests.support.distributions import installed

WORDS = "harbour ledger clock keeper river light boat fox Varn Ines Tomas writes old".split()  # noqa: SIM905
DOCUMENTS = [
    Document(f"doc{number}", " ".join(WORDS[(number * i) % 13] for i in range(3, 33)))
    for number in range(1, 9)
]

OTHERS = [
    Document(f"more{number}", " ".join(WORDS[(number * i) % 13] for i in range(5, 35)))
    for number in range(1, 9)
]


@pytest.fixture
def make_index(make_index: MakeIndex) -> MakeIndex:
    """Each document is one chunk."""
    return lambda name="index", **settings: make_index(name, chunk_tokens=256, **settings)


CODECS = ["lossless", "packed", "cachegen:1", "transform:4", "transform:1.5"]


def kv_of(index: Index, number: int) -> ChunkKV:
    chunk = index.catalog.chunks(chunk_ids(index))[number]
    encoded = index.open_kv(chunk.chunk_id)
    return read_all(encoded, index.config.spec)


def chunk_ids(index: Index) -> list[str]:
    return [chunk_id for doc in DOCUMENTS for chunk_id in index.catalog.chunk_ids_of(doc.source)]


def distance(first: ChunkKV, second: ChunkKV) -> float:
    pairs = ((first.keys, second.keys), (first.values, second.values))
    return float(sum((a - b).square().sum() for a, b in pairs))


@pytest.mark.parametrize("codec", CODECS)
def test_the_first_ingestion_fits_the_codec(codec: str, make_index: MakeIndex) -> None:
    raw, index = make_index("raw", codec="raw"), make_index("coded", codec=codec)
    assert index.config.profile == ""
    raw.add([*DOCUMENTS, *OTHERS])
    seen: list[IngestProgress] = []
    report = index.add([*DOCUMENTS, *OTHERS], on_progress=seen.append)
    assert report.ok
    assert {progress.stage for progress in seen} == {"read", "profile", "compute"}
    has_levels = codec not in ("lossless", "packed")
    assert any("fitting level" in progress.doing for progress in seen) == has_levels
    assert index.config.codec == codec
    assert (index.path / "profiles" / f"{index.config.profile}.safetensors").is_file()
    assert report.size_bytes == index.stats().size_bytes < raw.stats().size_bytes
    error = distance(kv_of(index, 3), kv_of(raw, 3))
    exact = kv_of(raw, 3)
    energy = distance(exact, ChunkKV(exact.keys * 0, exact.values * 0))
    assert error == 0 if codec == "lossless" else 0 < error < 0.2 * energy
    assert index.upkeep.verify().ok

    reopened = Index.open(index.path, model=index.model, embedding="hashing")
    assert distance(kv_of(reopened, 3), kv_of(index, 3)) == 0
    more = reopened.add([*DOCUMENTS, Document("another", "The keeper writes of the light.")])
    assert (more.num_records, reopened.config.profile) == (1, index.config.profile)
    reopened.close()


def test_recoding_there_and_back(make_index: MakeIndex) -> None:
    index = make_index()
    index.add(DOCUMENTS)
    exact = [kv_of(index, number) for number in range(8)]
    raw_bytes = index.stats().size_bytes

    report = index.upkeep.recode("lossless")
    assert (report.num_records, report.num_recoded, report.num_computed) == (8, 8, 0)
    assert report.size_bytes == index.stats().size_bytes < report.size_bytes_before == raw_bytes
    assert all(distance(kv_of(index, n), exact[n]) == 0 for n in range(8))

    seen: list[tuple[int, int]] = []
    lossy = index.upkeep.recode("transform:1", on_progress=lambda *done: seen.append(done))
    assert (lossy.num_recoded, lossy.num_computed) == (8, 0)
    assert seen == [(n, 8) for n in range(8)]
    assert all(distance(kv_of(index, n), exact[n]) > 0 for n in range(8))

    again = index.upkeep.recode("transform:1")
    assert (again.num_recoded, again.size_bytes) == (0, lossy.size_bytes)

    back = index.upkeep.recode("raw")  # what was lost is computed again
    assert (back.num_recoded, back.num_computed, back.size_bytes) == (8, 8, raw_bytes)
    assert all(distance(kv_of(index, n), exact[n]) == 0 for n in range(8))
    assert index.config.profile == ""


def test_an_interrupted_recoding_can_be_read_and_is_completed(
    make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index()
    index.add(DOCUMENTS)
    exact = [kv_of(index, number) for number in range(8)]

    class KilledError(BaseException):
        pass

    def kill(done: int, _total: int) -> None:
        if done == 5:
            raise KilledError

    with pytest.raises(KilledError):
        index.upkeep.recode("cachegen:2", on_progress=kill)
    reopened = Index.open(index.path, model=index.model, embedding="hashing")
    errors = [distance(kv_of(reopened, n), exact[n]) for n in range(8)]
    assert sorted(error == 0 for error in errors) == [False] * 5 + [True] * 3
    assert reopened.upkeep.verify().ok
    report = reopened.upkeep.recode("cachegen:2")
    assert (report.num_recoded, report.num_computed) == (3, 0)
    reopened.close()


def test_a_missing_profile_is_a_miss_and_recoding_mends_it(make_index: MakeIndex) -> None:
    index = make_index(codec="cachegen:2")
    index.add(DOCUMENTS)
    (path,) = (index.path / "profiles").iterdir()
    content = path.read_bytes()
    path.unlink()
    reopened = Index.open(index.path, model=index.model, embedding="hashing")
    with pytest.raises(ProfileError, match="cannot read the codec profile"):
        kv_of(reopened, 0)
    assert "codec profile" in reopened.upkeep.verify().problems[0].reason
    with pytest.raises(ProfileError, match="kvrag recode"):
        reopened.add([Document("new", "The keeper of the light.")])
    report = reopened.upkeep.recode("cachegen:2")  # fitted anew
    assert (report.num_recoded, report.num_computed) == (8, 8)
    assert reopened.upkeep.verify().ok
    (path,) = (index.path / "profiles").iterdir()
    path.write_bytes(b"damaged")
    reopened.close()
    repaired = Index.open(index.path, model=index.model, embedding="hashing")
    report = repaired.upkeep.verify(repair=True)
    assert report.ok  # the same profile, fitted again
    assert kv_of(repaired, 0).num_tokens > 0
    repaired.close()

    path.write_bytes(content[:-1] + b"\0" * (content[-1:] != b"\0"))
    with pytest.raises(ProfileError, match="expected"):
        read_profile(path, path.stem)


def test_a_profile_serves_its_model_and_codec_alone(make_index: MakeIndex, tmp_path: Path) -> None:
    index = make_index(codec="raw")
    index.add(DOCUMENTS)
    profile = index.upkeep.fit_profile("transform:2")
    from tests.support.models import make_model, make_tokenizer

    other_model = KVModel.load(
        make_model("llama", num_hidden_layers=2, seed=7), tokenizer=make_tokenizer()
    )
    other = make_index("other", model=other_model, codec="raw")
    other.add(DOCUMENTS)
    with pytest.raises(ParameterError, match="was fitted to a model with fingerprint"):
        other.upkeep.recode("transform:2", profile=profile)
    with pytest.raises(ParameterError, match="was fitted to a model with fingerprint"):
        make_index("third", model=other_model, codec="transform:2", profile=profile)
    with pytest.raises(ParameterError, match="no level '9'"):
        index.upkeep.recode("transform:9", profile=profile)
    # Of another codec, though that has a level of the same name.
    for codec in ("lossless", "cachegen:2"):
        with pytest.raises(ParameterError, match="was fitted for transform 'pca'"):
            index.upkeep.recode(codec, profile=profile)
    with pytest.raises(ParameterError, match="takes no profile"):
        index.upkeep.recode("raw", profile=profile)
    with pytest.raises(ParameterError, match="needs no profile"):
        index.upkeep.fit_profile("raw")
    path = tmp_path / "fitted.safetensors"
    path.write_bytes(profile.content)
    twin = make_index("twin", codec="transform:2", profile=read_profile(path))
    twin.add(DOCUMENTS[:2])
    assert twin.config.profile == profile.hash
    assert other.config.codec == index.config.codec == "raw"


def test_too_little_to_fit_to_is_stored_raw(make_index: MakeIndex) -> None:
    index = make_index(codec="cachegen:2")
    short = Document("short", "The keeper of the light.")
    report = index.add([short])
    assert "KV is stored raw until the index holds 512 tokens" in report.note
    assert (index.config.codec, index.config.profile) == ("cachegen:2", "")
    chunk = index.catalog.chunks(index.catalog.chunk_ids_of("short"))[0]
    (exact,) = index.model.prefill(index.prefix_ids, [chunk.token_ids])
    encoded = index.open_kv(chunk.chunk_id)
    assert distance(read_all(encoded, index.config.spec), exact) == 0
    assert index.stats().codec == "raw, cachegen:2 later"
    index.store.delete(index.key_of(chunk))
    assert index.upkeep.verify(repair=True).num_repaired == 1
    assert index.upkeep.verify().ok
    more = index.add([short, *DOCUMENTS])  # and with more it is fitted
    assert index.stats().codec == "cachegen:2"
    assert "fitted on" in more.note
    assert "tokens only" in more.note
    assert index.config.profile
    assert index.upkeep.verify().ok
    recoded = index.upkeep.recode("cachegen:2")  # what was raw is coded already
    assert (recoded.num_records, recoded.num_recoded) == (9, 0)
    with pytest.raises(ParameterError, match="256 tokens or more"):
        make_index("empty").upkeep.fit_profile("transform")


def many(number: int, num_words: int) -> list[Document]:
    return [
        Document(f"many{n}", " ".join(WORDS[n * i * i % 13] for i in range(num_words)))
        for n in range(1, number + 1)
    ]


def test_a_new_index_packs_once_there_is_enough(make_index: MakeIndex) -> None:
    index = make_index()
    assert "raw until the index holds 1,024 tokens to fit packed" in index.add(DOCUMENTS[:2]).note
    assert index.stats().codec == "raw, packed later"
    index.add(many(12, 100))
    stats = index.stats()
    assert stats.codec == "packed"
    assert stats.bytes_per_token > 4 * stats.stored_bytes_per_token
    assert index.upkeep.verify().ok


def test_a_fit_that_fails_is_tried_once_before_storing_and_once_after(
    make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrag.ingest.stages.COMMIT_TOKENS", 600)
    samples: list[int] = []

    def fail(*args: object) -> None:
        samples.append(len(list(args[3])))
        raise ParameterError("too few")

    with monkeypatch.context() as patched:
        patched.setattr("kvrag.codec.fitting.fit_profile", fail)
        index = make_index(codec="cachegen:2")
        assert index.add(many(12, 200)).note == "KV was stored raw: too few"
        assert len(samples) == 2  # not once for each window
    index.add(many(16, 200))
    assert index.stats().codec == "cachegen:2"


@pytest.mark.parametrize("doing", ["writing", "compute"])
def test_what_was_raw_is_recoded_after_a_kill(make_index: MakeIndex, doing: str) -> None:
    """Also if the ingestion that fitted the codec was killed before or after that."""
    index = make_index(codec="cachegen:2")
    index.add(Document("short", "The keeper of the light."))

    class KilledError(BaseException):
        pass

    def kill(progress: IngestProgress) -> None:
        if progress.stage == doing or progress.doing.startswith(doing):
            raise KilledError

    with pytest.raises(KilledError):
        index.add(DOCUMENTS, on_progress=kill)
    reopened = Index.open(index.path, model=index.model, embedding="hashing")
    assert reopened.add(DOCUMENTS).ok
    assert reopened.upkeep.recode("cachegen:2").num_recoded == 0
    assert reopened.upkeep.verify().ok
    reopened.close()


def test_garbage_collection_keeps_the_profiles_that_records_name(make_index: MakeIndex) -> None:
    index = make_index()
    index.add(DOCUMENTS)
    index.upkeep.recode("cachegen:2")
    used = index.config.profile
    index.upkeep.fit_profile("lossless")
    index.upkeep.fit_profile("transform:3")
    assert len(index.coding.profiles.hashes()) == 3
    report = index.upkeep.gc()
    assert (report.num_records, report.num_profiles) == (0, 2)
    assert index.coding.profiles.hashes() == [used]
    index.upkeep.recode("raw")
    assert index.upkeep.gc().num_profiles == 1
    assert index.upkeep.verify().ok


def test_recoding_believes_the_chunk_not_the_record(make_index: MakeIndex) -> None:
    index = make_index()
    index.add(DOCUMENTS)
    exact = kv_of(index, 0)
    key = index.key_of(index.catalog.chunks(chunk_ids(index))[0])
    longer = ChunkKV(exact.keys.repeat(1, 1, 2, 1), exact.values.repeat(1, 1, 2, 1))
    index.store.replace(key, index.coding.codec.encode(key, longer))
    with pytest.raises(RecordError, match=r"holds \d+ tokens, expected"):
        kv_of(index, 0)
    report = index.upkeep.recode("lossless")
    assert (report.num_recoded, report.num_computed) == (8, 1)
    assert distance(kv_of(index, 0), exact) == 0


MIRROR = """
from kvrag.codec.raw import RawCodec


class MirrorCodec(RawCodec):
    name = label = "mirror"
"""


def test_a_codec_of_another_distribution(make_index: MakeIndex, tmp_path: Path) -> None:
    """An index is made with it, and one of another codec reads its records."""
    point = {"kvrag.codecs: mirror": "mirror_codec:MirrorCodec"}
    with installed(tmp_path / "site", "mirror_codec", MIRROR, point):
        index = make_index(codec="mirror")
        index.add(DOCUMENTS)
        assert index.config.codec == "mirror"
        assert index.upkeep.verify().ok
        exact = [kv_of(index, number) for number in range(8)]
        raw = make_index("raw")
        raw.add(DOCUMENTS)
        assert all(distance(kv_of(raw, n), exact[n]) == 0 for n in range(8))
        # Half of the records of one are the other's, as when recoding was broken off.
        keys = sorted(raw.store.keys())
        theirs = index.coding.codec
        for key in keys[:4]:
            found = raw.store.open(key)
            kv = read_all(raw.coding.open(key, found, raw.config.spec), raw.config.spec)
            found.close()
            raw.store.replace(key, theirs.encode(key, kv))
        assert all(distance(kv_of(raw, n), exact[n]) == 0 for n in range(8))
        report = raw.upkeep.recode("raw")
        assert (report.num_recoded, report.num_records) == (4, 8)
        with pytest.raises(ParameterError, match="takes no profile"):
            index.upkeep.recode("mirror", profile=raw.upkeep.fit_profile("cachegen:1"))
        path = index.path
        index.close()
        Index.open(path, model=raw.model, embedding="hashing").close()
    with pytest.raises(IndexFormatError, match="no codec 'mirror'"):
        Index.open(path, model=raw.model, embedding="hashing")
