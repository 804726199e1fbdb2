"""`KVEngine`: answers prompts, and takes the KV of known chunks from the index."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from kvrag import arguments
from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.asking import Asking
from kvrag.engine.constraint import Allowed
from kvrag.engine.open_answer import OpenAnswer
from kvrag.engine.options import DEFAULT_MAX_TOKENS, ENGINE_DEFAULTS, EngineOptions
from kvrag.engine.prompt_fuser import PromptFuser
from kvrag.engine.prompt_reader import PromptReader
from kvrag.engine.request import (
    Message,
    Prompt,
    Recompute,
    Request,
    checked_batch,
    checked_messages,
)
from kvrag.engine.scheduler import Scheduler, Start
from kvrag.engine.text_stream import end_ids
from kvrag.errors import ParameterError
from kvrag.fusion.controller import Choice, calibrated
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.linked_rows import ChosenLinks
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.fusion.policies.base import NonePolicy
from kvrag.fusion.repair import Repair
from kvrag.fusion.slices import Slices, whole
from kvrag.ingest.index import Index
from kvrag.ingest.search import Reranker
from kvrag.kvcache import FusedKV
from kvrag.loading import threads
from kvrag.models.adapter import without_adapters
from kvrag.models.kv_model import KVModel
from kvrag.optiontable import attributes, options_of, with_options
from kvrag.process import OfProcess, working

if TYPE_CHECKING:
    from kvrag.engine.whole import WholeFuser


class KVEngine(OfProcess):
    """Answers prompts over an index at the cost of what the index does not hold.

    Any prompt is valid. The engine recognises chunks of the index anywhere in the prompt's text.
    It places their stored KV, repairs it as the policy says, and computes the rest. The token ids
    are those of the plain pipeline. The engine prefills and counts whatever it cannot reuse.

    Parameters
    ----------
    index
        The index to answer from, with the index's model.
    options
        The options of the engine, and the defaults of its answers, which calls may override.

    Raises
    ------
    LinksError
        If the file of links is missing or damaged; at the first prompt, if the links belong to
        another model.

    Notes
    -----
    You can call the engine from several threads and keep several streams open at once. A stream
    holds no lock between two pieces. Open answers are written together, a token of each at a time:
    the thread that waits for a piece advances all of them. Other threads fuse prompts beside it.

    An engine and its index belong to one process. Copying or pickling them, and using them in a
    forked process, raises ProcessError: start processes by ``spawn``, and open the index in each.
    """

    def __init__(self, index: Index, **options: Any) -> None:
        self._reader = PromptReader(index)
        self.index = index
        own = {one.name for one, _ in options_of(EngineOptions)}
        arguments.only(options, {*own, *ENGINE_DEFAULTS}, "an engine")
        made = EngineOptions(**{name: options[name] for name in own & options.keys()})
        self._links = ChosenLinks(made.links, lambda: index.model_folder, lambda: index.model)
        self._fuser: PromptFuser | WholeFuser
        if not index.config.has_kv:
            from kvrag.engine.whole import WholeFuser

            self._fuser = WholeFuser(index, made)
        else:
            self._fuser = PromptFuser(index, self._links, made)
        defaults = {name: options.get(name) for name in ENGINE_DEFAULTS}
        usual = Request(
            "",
            policy=DEFAULT_POLICY,
            ratio=index.config.chunk_context.default_ratio,
            max_tokens=DEFAULT_MAX_TOKENS,
        )
        self.defaults = Request.of("", defaults).over(usual)
        self._scheduler = Scheduler(made.max_batch, lambda number: index.model.twin(number))
        self._choice(self.defaults)

    @property
    def kept_bytes(self) -> int:
        """Memory that the KV of ended answers takes now, at most `session_bytes`."""
        return self._fuser.sessions.size_bytes

    @property
    def stored_bytes(self) -> int:
        """Size of the KV of ended answers in the store now, at most `session_store_bytes`."""
        return self._fuser.stored.size_bytes

    @property
    def moved(self) -> float:
        """When the batch of answers was last advanced, by `time.perf_counter`."""
        return self._scheduler.moved

    def ask(
        self,
        question: str,
        k: int = 4,
        *,
        history: Sequence[Message] = (),
        filter: Mapping[str, Any] | None = None,
        reranker: Reranker | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question from the index: search, build the prompt, generate, name the sources.

        For the pieces of the answer as they are written, or for event loops and batches, give what
        `question` returns to `stream`, `astream`, `agenerate` or `generate_batch`.

        Parameters
        ----------
        question, k, history, filter, reranker, options
            See `question`.

        Raises
        ------
        ParameterError
            If the question is empty, or a value is out of range.
        PromptTooLongError
            If the chunks and the history leave no room in the context window.
        """
        return self.generate(
            self.question(question, k, history=history, filter=filter, reranker=reranker, **options)
        )

    def question(
        self,
        question: str,
        k: int = 4,
        *,
        history: Sequence[Message] = (),
        filter: Mapping[str, Any] | None = None,
        reranker: Reranker | None = None,
        **options: Any,
    ) -> Request:
        """Search the index, and return the request that `ask` answers.

        The prompt holds the chunks in reading order, the best document last, then the question: as
        a message for the model's chat template, or as text after two solved examples for a model
        without one. The answer ends where the model begins to ask itself, or repeats itself.

        Parameters
        ----------
        question
            The question; it is also what is searched for.
        k
            Number of chunks to retrieve.
        history
            The conversation so far, as messages; only for models with a chat template. Give the
            earlier messages as they were: ``[*request.prompt, {"role": "assistant", "content":
            answer.text}]``. Their KV is then kept, and their chunks are not put in again.
        filter, reranker
            See `kvrag.Index.search`.
        options
            Fields of `Request`; `hints` and `stop` are added to the question's own.

        Raises
        ------
        ParameterError
            If the question is empty, or a value is out of range.
        """
        self.require_here()
        asking = Asking(k, filter, reranker)
        if history:
            checked_messages(history)
        turns = checked_messages([*(history or ()), {"role": "user", "content": question}])
        return asking.request(self.index, turns, **options)

    def prompt_ids(
        self,
        prompt: Prompt,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Return the token ids that the plain pipeline would feed for `prompt`.

        Both treat control strings in documents and messages as text, unless the index keeps them.

        Parameters
        ----------
        prompt, hints, tools
            See `generate`.
        """
        self.require_here()
        return self._reader.token_ids(prompt, hints, tools)

    def fuse(
        self,
        prompt: Prompt | Request,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        **options: Any,
    ) -> FusedPrompt:
        """Return the prompt's KV and first logits, without generating.

        Transformers can continue from it with ``model.hf.generate(**fused.to_generate())``. Call
        that inside ``with fused.answering(model):`` if there are link tokens. The answer begins at
        index ``fused.kv.num_tokens`` of the result. It takes no KV of earlier answers.

        Parameters
        ----------
        prompt, options
            See `generate`; `max_tokens` sets the room in the buffer after the prompt.
        is_wanted
            Asked before and after each layer; if it returns False, fusing stops.

        Raises
        ------
        StoppedError
            If the result is no longer wanted.
        """
        self.require_here()
        started = time.perf_counter()
        request = Request.of(prompt, options).over(self.defaults)
        choice = self._choice(request)
        with working():
            laid_out = self._reader.lay_out(request, self._fuser.early(request))
            seconds = time.perf_counter() - started
            work = self._fuser.fuse(request, choice, laid_out, seconds, keeps=False)
            return whole(work, is_wanted).fused

    def give_back(self, fused: FusedPrompt, after: torch.cuda.Event | None = None) -> None:
        """Return a prompt's buffer for the next prompt; do not use `fused` afterwards.

        Parameters
        ----------
        after
            What the next prompt waits for: a copy from the buffer that was only started, for
            example. None: nothing uses the buffer any more.
        """
        self.give_memory(fused.kv, after)

    def give_memory(self, kv: FusedKV, after: torch.cuda.Event | None = None) -> None:
        """Let the next prompt use a buffer's memory; for `after` see `give_back`."""
        self._fuser.buffers.give_back(kv, after)

    @property
    def stream_counts(self) -> Mapping[str, Any]:
        """Streamed chunks by level, and deadlines met and missed, since the engine's creation."""
        return self._fuser.stream_counts

    def expected_seconds(self, request: Request, num_stored: int, num_fresh: int) -> float | None:
        """Return what computing a prompt of this many tokens takes here; None if never measured."""
        choice = request.over(self.defaults).recompute.choice()
        return self._fuser.computing_seconds(choice, num_stored, num_fresh)

    def _choice(self, request: Request) -> Choice:
        """Return how to repair reused tokens, with the index's calibration if that is needed.

        Raise ParameterError if the index holds no tokens that the policy could recompute.
        """
        choice = request.recompute.choice()
        if not self.index.config.has_kv:
            usual = Recompute(DEFAULT_POLICY), Recompute(NonePolicy.name)
            if request.ttft is not None or request.recompute not in usual:
                raise ParameterError(
                    "policy, ratio and ttft: this index's model computes each prompt as a whole, "
                    "so nothing of it could be repaired, or loaded in part; leave them out"
                )
            return Repair(NonePolicy())
        return calibrated(choice, lambda: self.index.calibration)

    @property
    def links_digest(self) -> str:
        """Digest of the link tokens that follow chunks, or "" without any; loads no weights."""
        return self._links.digest

    def generate(self, prompt: Prompt | Request, **options: Any) -> Answer:
        """Answer a prompt.

        Parameters
        ----------
        prompt
            One string, or messages (``{"role": ..., "content": ...}``) for the chat template; or
            a `Request`, which already contains its options.
        options
            The other fields of `Request`. The engine's defaults apply to those left out.

        Raises
        ------
        ParameterError
            If a value is out of range or a policy is unknown.
        PromptTooLongError
            If the prompt leaves no room in the context window.
        UnsupportedModelError
            If eviction is requested for a model with custom attention code.
        """
        (answer,) = self._scheduler.answers([self._start_now(prompt, options)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt | Request],
        *,
        return_exceptions: Literal[False] = False,
        **options: Any,
    ) -> list[Answer]: ...

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt | Request],
        *,
        return_exceptions: Literal[True],
        **options: Any,
    ) -> list[Answer | Exception]: ...

    def generate_batch(
        self,
        prompts: Sequence[Prompt | Request],
        *,
        return_exceptions: bool = False,
        **options: Any,
    ) -> list[Answer] | list[Answer | Exception]:
        """Answer several prompts together; the answers are those of `generate`, in order.

        Parameters
        ----------
        prompts
            The prompts, or requests, which already contain their options.
        return_exceptions
            Whether the error of a prompt takes its answer's place in the list, as in
            `asyncio.gather`. Otherwise the first one is raised, after all others are answered.
        options
            The other fields of `Request`, for each prompt.
        """
        self.require_here()  # here: the batch's own thread is the parent's
        starts = []
        for one in checked_batch(prompts):
            own = one.ttft if isinstance(one, Request) else options.get("ttft")
            has_target = own is not None or self.defaults.ttft is not None
            # A context each: several threads read prompts.
            fuse = partial(self._start_later, copy_context(), one, options)
            starts.append(Start(fuse, has_target=has_target))
        answers = self._scheduler.answers(starts)
        errors = [one for one in answers if isinstance(one, Exception)]
        if errors and not return_exceptions:
            raise errors[0]
        return answers

    async def agenerate(self, prompt: Prompt | Request, **options: Any) -> Answer:
        """Answer a prompt while the event loop runs on; parameters and errors as in `generate`.

        Calls that wait at the same time are answered together. If the task is cancelled, the answer
        leaves the batch at the next step.
        """
        async for delta in self.astream(prompt, **options):
            if delta.answer is not None:
                return delta.answer
        raise AssertionError("the last piece carries the answer")

    async def astream(
        self, prompt: Prompt | Request, **options: Any
    ) -> AsyncGenerator[AnswerDelta, None]:
        """Answer a prompt piece by piece, as `stream`, while the event loop runs on.

        One thread writes all answers that event loops wait for, and ends with the last of them. A
        stream that is closed leaves the batch at the next step.
        """
        self.require_here()
        start = self._reading(prompt, options)
        async with aclosing(self._scheduler.apieces(start)) as pieces:
            async for delta in pieces:
                yield delta

    def stream(self, prompt: Prompt | Request, **options: Any) -> Iterator[AnswerDelta]:
        """Answer a prompt piece by piece; parameters and errors as in `generate`.

        The call itself checks the arguments, before you ask for the first piece.

        Yields
        ------
        AnswerDelta
            Pieces of text as soon as they are final; the last one carries the whole `Answer`.
        """
        return self._scheduler.pieces(self._start_now(prompt, options))

    def _start_now(self, prompt: Prompt | Request, options: Mapping[str, Any]) -> Start:
        """Check and read a prompt; return what fuses it later."""
        self.require_here()
        started = time.perf_counter()
        request = Request.of(prompt, options).over(self.defaults)
        choice = self._choice(request)
        evicts = request.eviction_policy is not None
        if evicts:
            from kvrag.eviction.cache import check_evictable

            check_evictable(self.index.model.hf)
        with working():
            laid_out = self._reader.lay_out(request, self._fuser.early(request))
            allowed = self._allowed(request)
        layout_seconds = time.perf_counter() - started

        def fuse(begun: float, twin: KVModel | None) -> Slices[OpenAnswer]:
            held = yield from self._fuser.fuse(
                request, choice, laid_out, layout_seconds, keeps=not evicts, twin=twin
            )
            # Time before its first piece was asked for does not count.
            started = begun - layout_seconds
            return OpenAnswer(self.index.model, request, laid_out, held, allowed, started)

        due_seconds = self._fuser.due_seconds(request, choice, laid_out.layout)
        return Start(fuse, due_seconds, has_target=request.ttft is not None)

    def _allowed(self, request: Request) -> Allowed | None:
        """Return which tokens may follow; to make it may take a second, too long for a step."""
        if request.constraint is None:
            return None
        model = self.index.model
        num_tokens = model.decoder.config.get_text_config().vocab_size
        ends = end_ids(model.decoder.generation_config, model.tokenizer)
        return Allowed(request.constraint, model.tokenizer, num_tokens, ends)

    def _reading(self, prompt: Prompt | Request, options: Mapping[str, Any]) -> Future[Start]:
        """Check and read a prompt in another thread, so that no answer waits for it."""
        context = copy_context()  # to which a trace belongs

        def read() -> Start:
            started = time.perf_counter()
            start = context.run(self._start_now, prompt, options)
            seconds = time.perf_counter() - started
            return replace(start, fuse=lambda begun, twin: start.fuse(begun + seconds, twin))

        return threads.start(read, threads.READING)

    def _start_later(
        self,
        context: Context,
        prompt: Prompt | Request,
        options: Mapping[str, Any],
        begun: float,
        twin: KVModel | None,
    ) -> Slices[OpenAnswer]:
        """Do all of it in the batch's thread, in the caller's context, to which a trace belongs."""
        started = time.perf_counter()
        start = context.run(self._start_now, prompt, options)
        seconds = time.perf_counter() - started
        yield False  # reading is one slice
        return (yield from start.fuse(begun + seconds, twin))

    def plain_ttft_seconds(self, prompt: Prompt) -> float:
        """Measure plain Transformers: seconds from the prompt's ids to the first token."""
        model = self.index.model
        ids = torch.tensor([self.prompt_ids(prompt)], device=model.device)
        with model.lock, torch.no_grad(), without_adapters(model.hf):
            started = time.perf_counter()
            int(model.hf(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax())
            return time.perf_counter() - started


KVEngine.__doc__ = with_options(
    KVEngine, attributes(EngineOptions), f"    {', '.join(ENGINE_DEFAULTS)}\n        See `Request`."
)
