"""What the routes do: requests in, answers and events out; and what the page shows at first."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

import kvrag
from kvrag import arguments
from kvrag.engine.answer import AnswerDelta
from kvrag.engine.asking import Asking
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.engine.verify import Audits, to_verify, verify
from kvrag.fusion.controller import takes_ratio
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.fusion.policies.base import NonePolicy
from kvrag.fusion.policies.registry import POLICIES
from kvrag.fusion.repair import Repair
from kvrag.fusion.slices import StoppedError
from kvrag.ingest.embedding import Vectors
from kvrag.ingest.index import Index
from kvrag.ingest.search import CosineRanker, Reranker
from kvrag.ingest.sentences import before_turn
from kvrag.llms.tool_calls import Shape as Form
from kvrag.models.chat import merged
from kvrag.models.tokens import encode
from kvrag.models.tools import tool_format
from kvrag.server import requests as q
from kvrag.server import responses as r
from kvrag.server.access import Account
from kvrag.server.answering import PREFIX, Generation, choices, request_options
from kvrag.server.gate import Record
from kvrag.server.problems import BusyError, RequestError, as_problem
from kvrag.server.queue import AnswerQueue, Batches, Pool, left
from kvrag.server.shapes import ChatShape, Shape, TextShape

# Shares of the stored tokens to compute again, between the default and full prefill.
_SHARES = (0.15, 0.3, 0.5)
# A template and a question of usual length.
_OWN_TOKENS = 40
_MOST_EXAMPLES = 4
_LONGEST_EXAMPLE = 60
# Chunks that are looked at for their headings.
_NUM_SAMPLES = 48


def about(engine: KVEngine, model: str, rag: str, top_k: int, **allowed: bool) -> r.About:
    """Describe an index and the defaults of answers; `allowed` as in `About`."""
    index, defaults = engine.index, engine.defaults
    num_documents, num_chunks, num_tokens = index.catalog.documents.counts()
    return r.About(
        version=kvrag.__version__,
        index=index.name,
        model=model,
        rag=rag,
        is_chat=bool(getattr(index.tokenizer, "chat_template", None)),
        num_documents=num_documents,
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        top_k=top_k,
        max_tokens=defaults.max_tokens or 0,
        policy=str(defaults.policy),
        policies=[
            one
            for one in POLICIES
            if index.config.has_kv or one in (NonePolicy.name, DEFAULT_POLICY)
        ],
        efforts=_efforts(engine, top_k * num_tokens // max(1, num_chunks)),
        examples=_examples(index),
        **allowed,
    )


def _efforts(engine: KVEngine, num_stored: int) -> list[r.Effort]:
    """Return ways to answer, the fastest first, the last in full, for this many stored tokens."""
    usual = engine.defaults.recompute.choice()
    ways: list[dict[str, Any]] = [{}]
    if engine.index.config.has_kv:
        is_none = isinstance(usual, Repair) and isinstance(usual.policy, NonePolicy)
        least = getattr(getattr(usual, "policy", usual), "ratio", None) or 0.0
        spec = engine.defaults.policy
        takes_share = isinstance(spec, str) and takes_ratio(spec)
        policy = {} if takes_share else {"policy": DEFAULT_POLICY}
        ways += [policy | {"ratio": one} for one in _SHARES if one > least]
        if not is_none:
            ways.insert(0, {"policy": NonePolicy.name})
    seconds = [
        *(engine.expected_seconds(Request("", **way), num_stored, _OWN_TOKENS) for way in ways),
        engine.expected_seconds(Request(""), 0, num_stored + _OWN_TOKENS),
    ]
    return [
        r.Effort(options=way, seconds=spent)
        for way, spent in zip([*ways, {"reuse": False}], seconds, strict=True)
    ]


def _examples(index: Index) -> list[str]:
    """Return headings of chunks from all over the index, one of a document."""
    found: dict[str, str] = {}
    for chunk in index.catalog.sample(_NUM_SAMPLES):
        heading = str(chunk.metadata.get("heading") or "")
        if any(map(str.isalpha, heading)) and len(heading) <= _LONGEST_EXAMPLE:
            found[chunk.source] = heading  # later ones say more than the title
    headings = list(dict.fromkeys(found.values()))
    every = max(1, len(headings) // _MOST_EXAMPLES)
    return headings[::every][:_MOST_EXAMPLES]


# Until then an error is a separate response; later it is an event of the stream.
_FIRST_SECONDS = 5.0
# Proxies close connections on which nothing happens.
_PING_SECONDS = 15.0
_SEARCH_THREADS = 8
_GRAMMAR_THREADS = 2
_MOST_CHARACTERS = 100_000  # in a text; embeddings and rerankers read far less at once
_ANY_FORM = Form()
_RETRY_SECONDS = 5
_OTHERS_ASK = "others are asking, and a check takes as long as full prefill; try again later"
# Prompts that a check computes: for its answer, in full, and from stored KV again.
_VERIFYING_COSTS = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Names:
    """The models' names in requests.

    Attributes
    ----------
    model, rag, embedding, ranker
        The language model, the same over the index, the embedding, and what ranks.
    created
        When the server began, in seconds since 1970.
    """

    model: str
    rag: str
    embedding: str
    ranker: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def listed(self) -> r.ModelList:
        """The models that requests may name, each once."""
        names = dict.fromkeys((self.model, self.rag, self.embedding, self.ranker))
        return r.ModelList(data=[r.Model(id=name, created=self.created) for name in names])


class Service:
    """Answers requests with one engine and one queue.

    Parameters
    ----------
    engine, queue, audits
        What writes answers, where they wait for their turn, and what verifies some of them.
    top_k
        How many chunks to retrieve for the model ``rag:NAME``.
    reranker
        What orders them, and the documents of others; None: the index's own search, and the
        embedding.
    """

    def __init__(
        self,
        engine: KVEngine,
        queue: AnswerQueue,
        audits: Audits,
        top_k: int,
        reranker: Reranker | None = None,
    ) -> None:
        self._audits = audits
        self._reranker = reranker
        self._ranker = reranker or CosineRanker(engine.index.embedding)
        config = engine.index.config
        self.names = Names(
            PurePath(config.model).name or "model",
            PREFIX + engine.index.name,
            PurePath(config.embedding).name,
            self._ranker.name,
        )
        self._engine = engine
        self._queue = queue
        self._top_k = top_k
        self._fingerprint = f"kvrag-{engine.index.config.model_fingerprint[:12]}"
        # Each returns the bytes that it keeps for a tenant.
        self.keepers: list[Callable[[str], int]] = []
        self._threads = Pool("search", _SEARCH_THREADS)
        # A question's search waits for nobody's grammar, and for no batch of texts.
        self._grammars = Pool("form", _GRAMMAR_THREADS)
        self._batches = Batches()
        self._is_verifying = False

    @property
    def is_ready(self) -> bool:
        """Whether a request would be accepted now."""
        return self._queue.is_ready and self._batches.is_ready

    async def close(self) -> None:
        """Stop the answers and the threads; the caller closes the engine's index."""
        await self._queue.stop()
        for threads in (self._threads, self._grammars, self._batches):
            threads.close()

    @property
    def index(self) -> Index:
        """The index that is served."""
        return self._engine.index

    def about(self, **allowed: bool) -> r.About:
        """Describe the index and the defaults of answers."""
        return about(self._engine, self.names.model, self.names.rag, self._top_k, **allowed)

    async def chat(
        self,
        asked: q.ChatRequest,
        http: HttpRequest,
        make_shape: Callable[..., ChatShape] | None = None,
    ) -> Response:
        """Answer a conversation; `make_shape` writes the answer in another form than a chat's."""
        request, search_seconds = await self._conversation(asked, http)
        calls = None
        if asked.calls_tools:
            calls = await self.in_thread(lambda: tool_format(self._engine.index.tokenizer))
        cites = asked.model == self.names.rag
        shape = (make_shape or partial(ChatShape, asked))(
            self.index.tokenizer, self._fingerprint, cites=cites, calls=calls
        )
        shape.search_seconds = search_seconds
        if asked.kvrag.found and asked.stream:
            shape.found = await self.in_thread(lambda: self.index.get_chunks(request.hints))
        return await self._answer([request], asked, http, shape)

    async def _conversation(
        self, asked: q.ChatRequest, http: HttpRequest
    ) -> tuple[Request, float | None]:
        """Return the engine's request, and the seconds of the search, if there was one."""
        self.require(asked.model, self.names.model, self.names.rag)
        turns = merged(one.turn for one in asked.messages)
        form = await self.in_thread(
            lambda: asked.shaped(self._engine.index.tokenizer),
            self._grammars if asked.has_form else None,
        )
        options = _options(asked, http, form)
        if asked.model == self.names.rag:
            k, wanted = asked.kvrag.k or self._top_k, asked.kvrag.filter
            asking = Asking(k, wanted, self._reranker)
            started = time.perf_counter()
            request = await self.in_thread(lambda: asking.request(self.index, turns, **options))
            return request, time.perf_counter() - started
        _refuse_retrieving(asked)
        return Request(turns, **options), None

    async def verify(self, asked: q.ChatRequest, http: HttpRequest) -> r.Verification:
        """Answer a conversation, and hold the answer against full prefill if nobody else asks."""
        if (asked.n or 1) > 1:
            raise RequestError(400, "n: one answer is verified at a time", param="n")
        if self._is_verifying or self._queue.num_open or self._queue.num_waiting:
            raise BusyError(_OTHERS_ASK, _RETRY_SECONDS)
        self._is_verifying = True
        leaving = asyncio.create_task(left(http))
        try:
            request = to_verify((await self._conversation(asked, http))[0])
            generation = await self._begin(http, [request], [request], _VERIFYING_COSTS)
            async with generation.ended_by(http):
                while not generation.is_done:
                    await generation.next()
            await generation.ended()
            (answer,) = generation.in_order

            def is_wanted() -> bool:
                return not (leaving.done() or self._queue.num_open or self._queue.num_waiting)

            found = await self.in_thread(lambda: verify(self._engine, request, answer, is_wanted))
        except StoppedError as error:
            raise BusyError(_OTHERS_ASK, _RETRY_SECONDS) from error
        finally:
            self._is_verifying = False
            leaving.cancel()
        return r.Verification(answer=answer.text, is_same=found.is_same, **asdict(found))

    async def complete(
        self,
        asked: q.CompletionRequest,
        http: HttpRequest,
        make_shape: Callable[..., Shape] | None = None,
    ) -> Response:
        """Complete one text or several; `make_shape` as in `chat`."""
        self.require(asked.model, self.names.model)
        _refuse_retrieving(asked)
        tokenizer = self.index.tokenizer
        prompts = await self.in_thread(lambda: texts_of(tokenizer, asked.prompts, "prompt"))
        options = _options(asked, http)
        requests = [Request(prompt, **options) for prompt in prompts]
        shape = (make_shape or partial(TextShape, asked))(tokenizer, self._fingerprint)
        return await self._answer(requests, asked, http, shape)

    async def embed(
        self,
        asked: q.EmbeddingRequest,
        http: HttpRequest,
        write: Callable[[Vectors, int], str] | None = None,
    ) -> Response:
        """Return vectors of texts; `write` makes the body from them and the number of tokens."""
        self.require(asked.model, self.names.embedding)
        embedding = self.index.embedding
        dim = embedding.dim
        if asked.dimensions not in (None, dim):
            raise RequestError(
                400,
                f"dimensions {asked.dimensions}: this embedding has {dim}; leave the field out",
                param="dimensions",
            )
        tokenizer = embedding.tokenizer or self.index.tokenizer
        texts = await self._batches.run(http, lambda: texts_of(tokenizer, asked.inputs, "input"))
        _check_texts(texts, "input")
        num_tokens = await self._charge(texts, asked.user, http)
        written, embed = write or partial(_embedding_list, asked), embedding.embed_whole
        body = await self._batches.run(http, lambda: written(embed(texts), num_tokens))
        return Response(body, media_type="application/json")

    async def rerank(self, asked: q.RerankRequest, http: HttpRequest) -> r.Ranking:
        """Order texts by how well they fit a question."""
        self.require(asked.model, self.names.ranker)
        texts = asked.texts
        _check_texts([asked.query], "query")
        _check_texts(texts, "documents")
        num_tokens = await self._charge([asked.query, *texts], asked.user, http)
        windows = self.index.embedding.windows
        scores = await self._batches.run(
            http, lambda: self._ranker.scores(asked.query, [windows(text) for text in texts])
        )
        best = sorted(range(len(texts)), key=lambda number: -scores[number])[: asked.top_n]
        results = [
            r.Ranked(
                index=number,
                relevance_score=scores[number],
                document=q.RankedText(text=texts[number]) if asked.return_documents else None,
            )
            for number in best
        ]
        usage = r.TextUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return r.Ranking(
            id=f"rerank-{secrets.token_hex(12)}", model=asked.model, results=results, usage=usage
        )

    async def _charge(self, texts: Sequence[str], user: str | None, http: HttpRequest) -> int:
        """Count the tokens of texts against the key's limits; return their number."""
        record = record_of(http)
        record.user = user
        tokenizer = self.index.tokenizer

        def counted() -> int:
            num_tokens = 0
            for text in texts:
                before_turn.get()()
                num_tokens += len(encode(tokenizer, [text], False)[0].token_ids)
            return num_tokens

        num_tokens = await self._batches.run(http, counted)
        record.account.check_prompt(num_tokens)
        record.account.charge(num_tokens)
        return num_tokens

    def require(self, name: str, *known: str) -> None:
        """Raise RequestError unless a model is one of `known`."""
        if name not in known:
            raise RequestError(
                404,
                f"there is no model {name!r} for this request; expected {' or '.join(known)}",
                code="model_not_found",
                param="model",
            )

    async def check_room(self, account: Account, num_bytes: int = 0) -> None:
        """Raise RequestError if the account's tenant may not keep these bytes, too."""
        if account.limits_bytes:
            kept = await self.in_thread(lambda: sum(one(account.tenant) for one in self.keepers))
            account.check_kept(kept + num_bytes)

    async def in_thread(self, call: Callable[[], T], threads: Pool | None = None) -> T:
        """Call what may wait for a disk or a lock, while the event loop runs on."""
        return await (threads or self._threads).run(call)

    async def _answer(
        self, asked_for: Sequence[Request], asked: q.Generating, http: HttpRequest, shape: Shape
    ) -> Response:
        record = record_of(http)
        requests = choices(asked_for, asked.n or 1)
        record.account.add(len(requests) - 1)
        record.num_answers = len(requests)
        generation = await self._begin(http, asked_for, requests, asked.n or 1)
        async with generation.ended_by(http):
            if not asked.stream:
                while not generation.is_done:
                    await generation.next()
                return await self.in_thread(lambda: JSONResponse(shape.body(generation.in_order)))
            first = await generation.next(0 if shape.found else _FIRST_SECONDS)
        return StreamingResponse(
            _lines(self, generation, shape, first, record),
            media_type=shape.media_type,
            headers={"X-Accel-Buffering": "no"},
        )

    async def _begin(
        self,
        http: HttpRequest,
        asked_for: Sequence[Request],
        requests: Sequence[Request],
        times: int,
    ) -> Generation:
        """Submit requests; the tokens of those that were asked for count several times."""
        record = record_of(http)
        account, engine, counts = record.account, self._engine, [0]
        if account.counts_tokens:
            counts = await self.in_thread(
                lambda: [
                    len(engine.prompt_ids(one.prompt, hints=one.hints, tools=one.tools))
                    for one in asked_for
                ]
            )
            account.check_prompt(max(counts))
        generation = Generation(self._queue, engine, account.tenant, requests, self._audits)
        record.generation = generation
        # Not before: the queue may refuse.
        account.charge(sum(counts) * times)
        return generation


def _embedding_list(asked: q.EmbeddingRequest, vectors: Vectors, num_tokens: int) -> str:
    """Return the body of OpenAI's API."""
    usage = r.TextUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    rest = r.EmbeddingList(data=[], model=asked.model, usage=usage).model_dump_json()
    before, after = rest.split("[]", 1)
    is_base64 = asked.encoding_format == "base64"
    # Text by text: one call for all would hold the interpreter's lock for seconds.
    data = [
        r.Embedding(
            index=number,
            embedding=base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if is_base64
            else vector.tolist(),
        ).model_dump_json()
        for number, vector in enumerate(vectors)
    ]
    return f"{before}[{','.join(data)}]{after}"


async def _lines(
    service: Service,
    generation: Generation,
    shape: Shape,
    first: tuple[int, AnswerDelta] | None,
    record: Record,
) -> AsyncIterator[str]:
    """Yield a stream's events, as its shape writes them."""
    try:
        for body in shape.opening():
            yield shape.written(body)
        piece = first
        while True:
            if piece is None:
                yield shape.ping
            else:
                events = shape.events(*piece)
                if piece[1].answer is not None:  # its citations may take a second
                    events = iter(await service.in_thread(partial(list, events)))
                for body in events:
                    yield shape.written(body)
            if generation.is_done:
                break
            piece = await generation.next(_PING_SECONDS)
        for body in shape.closing(generation.in_order):
            yield shape.written(body)
    except Exception as error:
        problem = as_problem(error)
        record.status = problem.status
        for body in shape.failure(problem):
            yield shape.written(body)
        return
    yield shape.ending


def record_of(http: HttpRequest) -> Record:
    """Return what is known about a request."""
    record: Record = http.state.record
    return record


def _options(asked: q.Generating, http: HttpRequest, form: Form = _ANY_FORM) -> dict[str, Any]:
    """Note who asks; return the fields of the engine's request that the client gives."""
    record = record_of(http)
    record.user = asked.user
    return request_options(asked, form, record.account.tenant)


def _check_texts(texts: Sequence[str], param: str) -> None:
    for text in texts:
        arguments.text(text, param)
        if not text.strip():
            raise RequestError(400, f"{param}: a text is empty; leave it out", param=param)
        if len(text) > _MOST_CHARACTERS:
            raise RequestError(
                400,
                f"{param}: a text has {len(text):,} characters, and at most {_MOST_CHARACTERS:,} "
                "are read; cut it",
                param=param,
            )


def _refuse_retrieving(asked: q.Generating) -> None:
    for name in ("k", "filter"):
        if getattr(asked.kvrag, name) is not None:
            raise RequestError(
                400,
                f"kvrag.{name}: the server retrieves only for the models {PREFIX}NAME; leave it "
                "out",
                param=f"kvrag.{name}",
            )


def texts_of(tokenizer: Any, given: Sequence[str | list[int]], param: str) -> list[str]:
    """Return texts or token ids as texts: prompts, or inputs without special tokens.

    A prompt's text lacks the token that the tokenizer puts first by itself.
    """
    is_input = param == "input"
    first = None if is_input else tokenizer.bos_token_id
    is_added = first is not None and encode(tokenizer, [""], True)[0].token_ids[:1] == (first,)
    texts = []
    for one in given:
        if isinstance(one, str):
            texts.append(one)
            continue
        if max(one) >= len(tokenizer):
            raise RequestError(
                400,
                f"{param}: there is no token {max(one)}: this model's tokenizer has "
                f"{len(tokenizer):,}; send token ids of that tokenizer, or texts",
                param=param,
            )
        ids = one[1:] if is_added and one[0] == first else one
        options = {"skip_special_tokens": is_input, "clean_up_tokenization_spaces": False}
        texts.append(str(tokenizer.decode(ids, **options)))
    return texts
