"""`KVEngine`: answers prompts, and takes the KV of known chunks from the index."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from kvrag import arguments
from kvrag.engine.answer import Answer, AnswerDelta, FinishReason, Usage
from kvrag.engine.buffers import BufferPool
from kvrag.engine.constraint import Allowed
from kvrag.engine.prompt_reader import LaidOutPrompt, PromptReader
from kvrag.engine.request import Prompt, Recompute, Request, RequestOptions
from kvrag.engine.sampling import Sampler
from kvrag.engine.text_stream import TextStream, end_ids
from kvrag.errors import KVRagError, ParameterError, PromptTooLongError
from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.cache import check_evictable
from kvrag.fusion.chosen_links import ChosenLinks
from kvrag.fusion.compression.compacting import compact, without_chunks
from kvrag.fusion.controller import Choice, calibrated
from kvrag.fusion.decoding import Decoder, make_decoder
from kvrag.fusion.fuser import CompressedLostError, FusedPrompt, computing_seconds, fuse
from kvrag.fusion.layout import Layout
from kvrag.fusion.links import LinkTokens
from kvrag.fusion.plan import Loading
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.repair import Repair
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.loading import MAX_LOAD_THREADS, threads
from kvrag.loading.streaming import StreamEstimates, Streaming
from kvrag.models.adapter import without_adapters

# The length of a question and of a context: a calibration's cost is linear between them.
_PRIOR_TOKENS = (30, 1000)


class KVEngine:
    """Answers prompts over an index at the cost of what the index does not hold.

    Any prompt is valid. The engine recognises chunks of the index anywhere in the prompt's text.
    It places their stored KV, repairs it as the policy says, and computes the rest. The token ids
    are those of the plain pipeline. The engine prefills and counts whatever it cannot reuse.

    Parameters
    ----------
    index
        The index to answer from, with the index's model.
    policy
        Which reused tokens are computed again: a name of
        `kvrag.fusion.policies.registry.POLICIES`, with parameters as in
        ``"gradual:spread=0.8"``. ``"auto"`` chooses from what `kvrag calibrate` measured. An index
        of compressed chunks has no tokens that could be computed again: there the default means
        ``"none"``, and every other policy is refused.
    ratio
        Share of reused tokens to compute again; ``"auto"`` treats it as an upper bound. None uses
        the policy's default.
    boundary_tokens
        Alternative to `ratio` for ``"boundary"`` and ``"seam"``: tokens to compute again per chunk.
    eviction
        What to evict from the cache while an answer is generated: a name of
        `kvrag.eviction.registry.EVICTIONS` with parameters, as in ``"corm:window=256:recent=256"``,
        or a policy; None and ``"none"`` keep the full cache.
    links
        Link tokens to insert after reused chunks (KVLink): a file that ``kvrag train links``
        wrote, or ``"off"``. None uses ``links.safetensors`` from the model's folder if it exists
        and fits; if it does not fit, prompts get no link tokens and their reports count that.
    max_tokens
        Maximum number of tokens in an answer; a call may override it.
    load_threads
        Number of chunks whose KV is read at the same time, while the rest of the prompt is computed
        layer by layer; 0 reads each layer before it is computed. None decides by the store and the
        idle cores (`kvrag.loading.threads.suitable`).
    ttft
        Target for the time to first token, in seconds, when streaming stored KV. The engine loads
        as much of each chunk as the time allows, or computes the chunk where that is at least as
        quick. None loads all stored KV.

    Raises
    ------
    LinksError
        If the file of links is missing or damaged; at the first prompt, if the links belong to
        another model.

    Notes
    -----
    You can call the engine from several threads and keep several streams open at once. Forward
    passes take turns, and a stream holds no lock between two pieces.
    """

    def __init__(
        self,
        index: Index,
        *,
        policy: str = DEFAULT_POLICY,
        ratio: float | None = None,
        boundary_tokens: int | None = None,
        eviction: str | EvictionPolicy | None = None,
        links: LinkTokens | str | Path | None = None,
        max_tokens: int = 256,
        load_threads: int | None = None,
        ttft: float | None = None,
    ) -> None:
        self._reader = PromptReader(index)
        self.index = index
        self._links = ChosenLinks(links, lambda: index.model_folder, lambda: index.model)
        self.defaults = Request(
            "",
            policy=policy,
            ratio=ratio,
            boundary_tokens=boundary_tokens,
            eviction=eviction,
            max_tokens=arguments.whole(max_tokens, "max_tokens", 1),
            ttft=ttft,
        )
        self._load_threads = (
            None
            if load_threads is None
            else arguments.whole(load_threads, "load_threads", 0, MAX_LOAD_THREADS)
        )
        self._estimates = StreamEstimates()
        self._buffers = BufferPool()
        self._choice(self.defaults)

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
        return self._reader.token_ids(prompt, hints, tools)

    def fuse(self, prompt: Prompt | Request, **options: Unpack[RequestOptions]) -> FusedPrompt:
        """Return the prompt's KV and first logits, without generating.

        Transformers can continue from it with ``model.hf.generate(**fused.to_generate())``. Call
        that inside ``with fused.answering(model):`` if there are link tokens, or if the policy has
        a temperature or scale. The answer begins at index ``fused.kv.num_tokens`` of the result.

        Parameters
        ----------
        prompt, options
            See `generate`; `max_tokens` sets the room in the buffer after the prompt.
        """
        started = time.perf_counter()
        request = Request.of(prompt, options).over(self.defaults)
        choice = self._choice(request)
        laid_out = self._reader.lay_out(request)
        return self._fuse(request, choice, laid_out, time.perf_counter() - started)

    def give_back(self, fused: FusedPrompt) -> None:
        """Return a prompt's buffer for the next prompt; do not use `fused` afterwards."""
        self._buffers.give_back(fused.kv)

    @property
    def stream_counts(self) -> Mapping[str, Any]:
        """Streamed chunks by level, and deadlines met and missed, since the engine's creation."""
        return self._estimates.link.counts()

    def _fuse(
        self, request: Request, choice: Choice, laid_out: LaidOutPrompt, layout_seconds: float
    ) -> FusedPrompt:
        layout, open_kv = laid_out.layout, laid_out.open_kv
        assert request.max_tokens is not None  # the engine's defaults set it
        if open_kv is None:
            # A placed prompt stays as it is: link tokens would move what follows them.
            if self.index.compression is not None:
                layout = compact(layout, laid_out.chunks, self.index.compression)
            layout = self._links.insert(layout, request.max_tokens)
        num_threads = self._load_threads
        if num_threads is None:
            num_threads = threads.suitable(self.index.store, self.index.model.device)
        loading = Loading(
            num_threads,
            self.index.tier_of if open_kv is None else None,
            None if request.ttft is None else self._streaming(request.ttft, layout_seconds),
        )
        buffer = self._take(layout, request.max_tokens)
        links = self._links.on_model if layout.links else None
        try:
            fused = fuse(
                self.index.model,
                layout,
                open_kv or self.index.on_demand.opener(self.index.open_kv, layout),
                choice,
                buffer,
                links,
                loading,
            )
        except CompressedLostError as error:
            self._buffers.give_back(buffer)
            # The compressed rows of these chunks have no tokens to compute instead, so lay out the
            # chunks' own tokens. Each call has fewer chunks, so this ends.
            fewer = replace(laid_out, layout=without_chunks(laid_out.layout, error.lost))
            return self._fuse(request, choice, fewer, layout_seconds)
        report = fused.report
        num_rows = sum(report.rows_by_layer) + report.rows_asked
        self._estimates.computing.observe(num_rows, computing_seconds(report.seconds))
        report = replace(report, seconds={"layout": layout_seconds, **report.seconds})
        self.index.counters.note(report)
        return replace(fused, report=report)

    def _take(self, layout: Layout, max_tokens: int) -> FusedKV:
        """Return a buffer for a prompt and its answer. Raises PromptTooLongError."""
        model = self.index.model
        num_tokens = len(layout.token_ids)
        end = layout.end_position
        if end >= model.max_positions:
            over = f"{num_tokens} tokens" if end == num_tokens else f"{end} positions"
            raise PromptTooLongError(
                f"the prompt has {over}, but {model.name} holds "
                f"{model.max_positions} with at least one to answer in; shorten it, or retrieve "
                "fewer chunks"
            )
        capacity = num_tokens + min(max_tokens, model.max_positions - end)
        return self._buffers.take(model.spec, num_tokens, capacity, model.device)

    def _streaming(self, ttft: float, layout_seconds: float) -> Streaming:
        """Return the streaming target of a prompt, with the estimates known so far."""
        started = time.perf_counter() - layout_seconds
        try:
            calibration = self.index.calibration
        except KVRagError:
            calibration = None  # the estimates then come from earlier prompts
        if calibration is None:
            return Streaming(ttft, started, self._estimates)
        if not self._estimates.computing.is_known:
            for num_tokens in _PRIOR_TOKENS:
                num_rows = num_tokens * self.index.config.num_layers
                self._estimates.computing.observe(num_rows, calibration.cost.of(num_rows, 0))
        loading = calibration.loading
        prior = None if loading is None else loading.tier(None).seconds_per_token
        return Streaming(ttft, started, self._estimates, prior)

    def _choice(self, request: Request) -> Choice:
        """Return how to repair reused tokens, with the index's calibration if that is needed.

        Raise ParameterError if the index holds no tokens that the policy could recompute.
        """
        choice = request.recompute.choice()
        compression = self.index.compression
        if compression is not None and choice.name != NonePolicy.name:
            if request.recompute == Recompute(DEFAULT_POLICY):
                return Repair(NonePolicy())
            raise ParameterError(
                f"policy {arguments.shown(request.policy)} computes reused tokens again, but this "
                "index stores "
                f"chunks as {compression}, whose rows are not tokens. Use policy 'none', or an "
                "index without compression"
            )
        return calibrated(choice, lambda: self.index.calibration)

    def _checked_eviction(self, request: Request, choice: Choice) -> EvictionPolicy | None:
        chosen = request.eviction_policy
        if chosen is None:
            return None
        if choice.scaling is not None:
            raise ParameterError(
                f"policy {choice} scales attention to reused keys, which eviction does not "
                "support: leave out temperature and scale, or eviction"
            )
        check_evictable(self.index.model.hf)
        return chosen

    @property
    def links_digest(self) -> str:
        """Digest of the link tokens that follow chunks, or "" without any; loads no weights."""
        return self._links.digest

    def generate(self, prompt: Prompt | Request, **options: Unpack[RequestOptions]) -> Answer:
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
        *_, last = self.stream(prompt, **options)
        assert last.answer is not None
        return last.answer

    def stream(
        self, prompt: Prompt | Request, **options: Unpack[RequestOptions]
    ) -> Iterator[AnswerDelta]:
        """Answer a prompt piece by piece; parameters and errors as in `generate`.

        The call itself checks the arguments, before you ask for the first piece.

        Yields
        ------
        AnswerDelta
            Pieces of text as soon as they are final; the last one carries the whole `Answer`.
        """
        started = time.perf_counter()
        request = Request.of(prompt, options).over(self.defaults)
        choice = self._choice(request)
        eviction = self._checked_eviction(request, choice)
        laid_out = self._reader.lay_out(request)
        return self._stream(request, choice, eviction, laid_out, time.perf_counter() - started)

    def _stream(
        self,
        request: Request,
        choice: Choice,
        eviction: EvictionPolicy | None,
        laid_out: LaidOutPrompt,
        layout_seconds: float,
    ) -> Iterator[AnswerDelta]:
        # This runs when the caller asks for the first piece; time before that does not count.
        started = time.perf_counter() - layout_seconds
        fused = self._fuse(request, choice, laid_out, layout_seconds)
        try:
            model = self.index.model
            layout = fused.layout
            timeout_seconds = request.timeout_seconds
            assert request.max_tokens is not None
            limit = min(request.max_tokens, model.max_positions - layout.end_position)
            ends = end_ids(model.hf.generation_config, model.tokenizer)
            allowed = None
            if request.constraint is not None:
                num_tokens = fused.logits.shape[-1]
                allowed = Allowed(request.constraint, model.tokenizer, num_tokens, ends)
            sampler = Sampler(request.sampling, fused.logits.device, allowed)
            text = TextStream(model.tokenizer, request.stop, is_calling=bool(request.tools))
            decoder: Decoder | None = None
            # The plain ids: repetition penalties must not count link tokens, nor miss the tokens
            # of compressed chunks.
            token_ids = torch.tensor(layout.plain_token_ids, device=fused.logits.device)

            token = sampler.next_token(fused.logits, token_ids)
            ttft_seconds = time.perf_counter() - started
            num_generated = 1
            finish: FinishReason = "length"
            while True:
                if token in ends:
                    finish = "stop"
                    break
                if piece := text.push(token):
                    yield AnswerDelta(piece)
                if text.stopped or sampler.is_complete:
                    finish = "stop"
                    break
                if num_generated == limit:
                    break
                if timeout_seconds is not None and time.perf_counter() - started > timeout_seconds:
                    finish = "timeout"
                    break
                token_ids = torch.cat([token_ids, token_ids.new_tensor([token])])
                # Made after the first token, which does not need it.
                decoder = decoder or make_decoder(model, fused, eviction)
                logits = decoder.step(token)
                token = sampler.next_token(logits, token_ids)
                num_generated += 1

            tail = "" if text.stopped else text.finish()
            answer = Answer(
                text=text.text,
                sources=laid_out.sources,
                report=replace(fused.report, eviction=decoder.report() if decoder else None),
                usage=Usage(fused.report.num_tokens, fused.report.num_cached, num_generated),
                finish_reason=finish,
                ttft_seconds=ttft_seconds,
                total_seconds=time.perf_counter() - started,
            )
            yield AnswerDelta(tail, answer)
        finally:
            self._buffers.give_back(fused.kv)

    def plain_ttft_seconds(self, prompt: Prompt) -> float:
        """Measure plain Transformers: seconds from the prompt's ids to the first token."""
        model = self.index.model
        ids = torch.tensor([self.prompt_ids(prompt)], device=model.device)
        with model.lock, torch.no_grad(), without_adapters(model.hf):
            started = time.perf_counter()
            int(model.hf(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax())
            return time.perf_counter() - started
