"""Every public parameter with values of wrong types: an error of the tree that names it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrag import arguments
from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.engine.options import ENGINE_DEFAULTS, AnswerOptions, EngineOptions, Sampling
from kvrag.engine.shared import shared_index
from kvrag.errors import IndexClosedError, KVRagError, PromptTooLongError
from kvrag.ingest.embedding import get_embedding
from kvrag.ingest.index import Index
from kvrag.ingest.settings import IndexSettings
from kvrag.models.kv_model import KVModel
from kvrag.optiontable import kind_of, options_of

NAN, INF = float("nan"), float("inf")
NO_WHOLE = [2.5, True, "4", NAN, [4], np.float32(2.0), np.array([4])]
NO_NUMBER = ["a", True, NAN, INF, -INF, [0.5], 1j, b"1", 10**400]
NO_TEXTS = [None, "abc", b"abc", 5, [None], [5], ["a", b"b"]]
NO_PATHS = ["", "~nosuchuser/x", "a\0b", "\ud800", "a" * 300, "a/" * 5000]
LONG = "x" * 1_000_000
PROMPT = "Who keeps the harbour ledger?"


def wrong_of(options: type) -> dict[str, list[Any]]:
    """Return what no number and no flag of a table of options may be."""
    found: dict[str, list[Any]] = {}
    of_kind = {int: NO_WHOLE, float: NO_NUMBER, bool: [1, "yes"]}
    for one, rule in options_of(options):
        wrong = [*of_kind.get(kind_of(one), ())]
        wrong += [None] if wrong and "None" not in str(one.type) else []
        wrong += [] if rule.least is None else [rule.least - 1]
        wrong += [] if rule.above is None else [rule.above]
        wrong += [] if rule.most is None else [rule.most + 1]
        found |= {one.name: wrong} if wrong else {}
    return found


NUMBERS = wrong_of(AnswerOptions)
ANSWERING = NUMBERS | {
    name: NUMBERS.get(name, []) + values
    for name, values in {
        "temperature": [1e-9],
        "top_k": [2**40],
        "repetition_penalty": [-1, 1e-300, 101],
        "frequency_penalty": [-2.1, 3],
        "seed": [2**63],
        "policy": [5, 2.5, True, b"none", ["none"], "", "unknown", "none:", "none(", "boundary(x)"],
        "eviction": [5, True, b"corm", ["corm"], "", "unknown", "corm:window=a", "corm:window=-1"],
        "hints": NO_TEXTS,
        "stop": [None, "abc", 5, [""], [None], [5]],
        "session": [3, b"ines", "\ud800"],
    }.items()
}


PROMPTS: list[Any] = [None, 5, 2.5, True, b"text", [], ["text"], [5], {}, {"role": "user"}]
PROMPTS += [[{"content": "no role"}], [{"role": None, "content": "x"}], object(), "a\udce9"]
PROMPTS += [[{"role": "user", "content": "x"}, {"role": "", "content": "x"}]]


def refused(call: Callable[[], object], name: str = "", value: object = None) -> str:
    with pytest.raises(KVRagError) as caught:
        pytest.fail(f"{name} {value!r:.80}: taken, and gave {call()!r:.80}")
    assert name.replace("_", " ") in str(caught.value).replace("_", " ").lower()
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def ids(value: object) -> str:
    # Not where an object is, which each process of a run would call otherwise.
    return repr(value)[:24] if type(value) is not object else "object"


def each(call: Callable[..., object], name: str, values: list[Any], said: str = "") -> None:
    """Let a call be refused for each value of one parameter."""
    for value in values:
        refused(lambda value=value: call(**{name: value}), said, value)


@pytest.mark.parametrize("name", ANSWERING)
def test_answering(index: Index, name: str) -> None:
    each(partial(KVEngine(index).stream, PROMPT), name, ANSWERING[name], name)


def test_engines(index: Index) -> None:
    wrong = [one for one in ANSWERING.items() if one[0] in ENGINE_DEFAULTS]
    wrong += wrong_of(EngineOptions).items()
    wrong += {
        "links": [5, True, b"x", "/nonexistent"],
        "load_threads": [65],
        "max_batch": [1025],
    }.items()
    for name, values in wrong:
        each(partial(KVEngine, index), name, values)


@pytest.mark.parametrize("value", [None, 5, True, b"x", "my-index", Path("my-index")], ids=ids)
def test_what_is_no_index(value: Any) -> None:
    assert "opened index" in refused(lambda: KVEngine(value), "index")
    if not isinstance(value, str | Path):
        refused(lambda: shared_index(value), "index")


@pytest.mark.parametrize("prompt", PROMPTS, ids=ids)
def test_prompts(index: Index, prompt: Any) -> None:
    engine = KVEngine(index)
    for call in (engine.generate, engine.fuse, engine.prompt_ids, engine.plain_ttft_seconds):
        refused(lambda call=call: call(prompt), "prompt")


def test_searching(index: Index) -> None:
    vector = np.ones(index.config.embedding_dim, dtype=np.float32)
    for search in (index.search, index.search_words):
        each(search, "query", [None, 5, b"x", ["x"], "", " \n", "\udce9"], "question")
    vectors = [None, "abc", 5, [], ["a"], [[1.0]], [NAN] * 1024, [1.0], object()]
    each(index.search_by_vector, "vector", vectors)
    for search, asked in (
        *((index.search, PROMPT), (index.search_words, PROMPT)),
        (index.search_by_vector, vector),
    ):
        each(partial(search, asked), "k", [*NO_WHOLE, None, 0, -1, 10**30], "k ")


def test_names_of_documents_and_chunks(index: Index) -> None:
    chunk_ids = [None, 5, b"x", ["x"], "\ud800"]
    for call in (index.open_kv, index.tier_of):
        each(call, "chunk_id", chunk_ids, "chunk_id")
    several = [*NO_TEXTS, *([one] for one in chunk_ids)]
    each(index.get_chunks, "chunk_ids", several, "chunk_ids")
    each(index.pin, "sources", several, "sources")
    for name in ("sources", "chunk_ids"):
        each(index.delete, name, NO_TEXTS, name)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "path": [None, 5, b"x", True, *NO_PATHS],
        "model": [None, 5, b"x", True, ["x"], "/nonexistent", *NO_PATHS],
        "embedding": [5, True, b"x", [], "unknown", *NO_PATHS],
        "codec": [None, 5, True, b"raw", "", "unknown", "transform:nan"],
        "chunk_tokens": [*NO_WHOLE, None, 0, -1],
        "context": [5, True, b"none", ["none"], "", "document:0", "filler:-1", "filler:1.5"],
        "compression": [None, 5, "drop:0.5"],
        "dtype": [5, True, b"float32", "float64", "float"],
        "tenant_salt": ["salt", 5, b"", b"x" * 65, ["x"]],
        "device": [5.5, True, b"cpu", ["cpu"], "abacus", "meta"],
        "store": [5, True, b"memory:", ["memory:"], "", "memory", "s4://x", "memory:?key_file="],
        "profile": [5, True, "x", b"x"],
    }.items(),
    ids=ids,
)
def test_making(tmp_path: Path, model: KVModel, name: str, values: list[Any]) -> None:
    given = {"path": tmp_path / "index", "model": model, "embedding": "hashing"}
    each(lambda **wrong: Index.create(**given | wrong), name, values)
    assert not (tmp_path / "index" / "index.json").exists()


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "path": [None, 5, b"x", True, "/nonexistent", *NO_PATHS],
        "model": [5, b"x", True, ["x"]],
        "embedding": [5, True, b"x", [], "unknown", *NO_PATHS],
        "device": [5.5, True, b"cpu", ["cpu"], "abacus", "meta"],
        "store": [
            *(5, True, b"memory:", ["memory:"], "memory", "s4://x", "memory:?key_file="),
            *(f"file:{path}" for path in NO_PATHS),
        ],
        "mend": [None, 1, "no"],
    }.items(),
    ids=ids,
)
def test_opening(index: Index, name: str, values: list[Any]) -> None:
    each(lambda **wrong: Index.open(**{"path": index.path} | wrong), name, values)


@pytest.mark.parametrize(
    "call",
    [
        lambda index: index.add([], dry_run="no"),
        lambda index: index.add([], limits=5),
        lambda index: index.add([], on_progress=5),
        lambda index: index.add([], loaders={5: "json:loads"}),
        lambda index: index.add([], loaders={".x": 5}),
        lambda index: index.add([], loaders={".x": LONG}),
        lambda index: index.add([], loaders=[1]),
        lambda index: index.add([], loaders=""),
        lambda index: index.upkeep.verify(repair=1),
        lambda index: index.upkeep.gc(delete_shared="no"),
        lambda index: index.upkeep.recode(5),
        lambda index: index.upkeep.recode("raw", profile="x"),
        lambda index: index.upkeep.move(5),
        lambda index: index.upkeep.move("memory:"),
        lambda index: index.upkeep.fit_profile(5),
        lambda index: index.upkeep.fit_profile(num_tokens=2.5),
        lambda index: index.upkeep.fit_profile(num_tokens=None),
    ],
)
def test_looking_after(index: Index, call: Callable[[Index], object]) -> None:
    refused(lambda: call(index))


@pytest.mark.parametrize(
    "call",
    [
        *(
            lambda index, name=name: KVEngine(index).generate(PROMPT, **{name: LONG})
            for name in ("policy", "eviction", "stop", "hints", "max_tokens", "ratio", LONG)
        ),
        lambda index: KVEngine(index).generate(PROMPT, policy=f"query:{LONG}=1"),
        lambda index: KVEngine(index).generate([{"content": LONG}]),
        lambda index: KVEngine(index, links=LONG),
        lambda index: IndexSettings(codec=LONG),
        lambda index: IndexSettings(chunk_tokens=10**5000),
        lambda index: Index.open(index.path, store=LONG),
        lambda index: KVModel.load(LONG),
        lambda index: get_embedding(LONG),
    ],
)
def test_messages_cut_what_they_quote(index: Index, call: Callable[[Index], object]) -> None:
    refused(lambda: call(index))


def test_numbers_of_other_libraries_are_numbers(index: Index) -> None:
    plain = KVEngine(index).generate(PROMPT, max_tokens=2, seed=3, temperature=0.5, top_k=5)
    engine = KVEngine(index, max_tokens=np.int64(2), load_threads=np.int32(1))
    theirs = engine.generate(
        PROMPT,
        max_tokens=np.int16(2),
        seed=np.uint64(3),
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        ratio=np.float32(0.15),
        timeout_seconds=np.float64(60),
        hints=np.array(["a", "b"]),
    )
    assert theirs.text == plain.text
    assert theirs.to_dict()["report"]
    assert index.search(PROMPT, np.int64(2)) == index.search(PROMPT, 2)
    assert Sampling(seed=np.int64(3)) == Sampling(seed=3)
    assert type(Sampling(top_p=np.float64(0.5)).top_p) is float
    assert arguments.number(np.float32(0.5), "x") == 0.5


def test_a_closed_index_says_so(tmp_path: Path, model: KVModel) -> None:
    opened = Index.create(tmp_path / "index", model=model, embedding="hashing")
    opened.add(Document("ines", "Ines keeps the harbour ledger of Varn."))
    engine = KVEngine(opened)
    (hit,) = opened.search(PROMPT)
    vector = opened.embedding.embed([PROMPT])[0]
    opened.close()
    opened.close()  # nothing more to close
    for call in (
        lambda: engine.generate(PROMPT),
        lambda: engine.generate(PROMPT, reuse=False),
        lambda: engine.stream(PROMPT),
        lambda: engine.fuse(PROMPT),
        lambda: opened.search(PROMPT),
        lambda: opened.search_words(PROMPT),
        lambda: opened.search_by_vector(vector),
        lambda: opened.get_chunks([hit.chunk.chunk_id]),
        lambda: opened.open_kv(hit.chunk.chunk_id),
        lambda: opened.add(Document("x", "y")),
        lambda: opened.delete(sources=["ines"]),
        lambda: opened.calibration,
        opened.documents,
        opened.stats,
        opened.upkeep.verify,
        opened.upkeep.gc,
    ):
        with pytest.raises(IndexClosedError, match="was closed: open it again"):
            call()


def test_a_prompt_that_cannot_fit_is_not_tokenised(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = KVEngine(index)
    asked: list[int] = []
    kind = type(index.tokenizer)
    tokenise = kind.__call__

    def note(self: Any, text: str, *others: Any, **named: Any) -> Any:
        asked.append(len(text))
        return tokenise(self, text, *others, **named)

    monkeypatch.setattr(kind, "__call__", note)
    message = [{"role": "user", "content": "word " * 2_000_000}]
    for prompt in ("word " * 2_000_000, message):
        for call in (engine.generate, engine.fuse, engine.prompt_ids):
            if prompt is message and not getattr(index.tokenizer, "chat_template", None):
                continue
            with pytest.raises(PromptTooLongError, match="10,000,0"):
                call(prompt)
    assert asked == []
    # What may fit is counted in tokens, as before.
    with pytest.raises(PromptTooLongError, match="tokens"):
        engine.generate("word " * 2000)
    assert asked


def test_contexts_of_chunks(index: Index) -> None:
    index.add(Document("ines", "Ines keeps the harbour ledger of Varn."))
    (chunk_id,) = index.catalog.chunk_ids_of("ines")
    for wrong in (5, [[1]], 1.5):
        refused(lambda wrong=wrong: index.open_kv(chunk_id, wrong), "context_ids")
        refused(lambda wrong=wrong: index.tier_of(chunk_id, wrong), "context_ids")
    assert index.open_kv(chunk_id, [1, 2]) is None
    opened = index.open_kv(chunk_id, [])
    assert opened.num_tokens
    index.delete(sources=["ines"])
