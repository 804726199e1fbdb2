"""`KVEngine`: prompts in, answers out, with the KV of known chunks taken from the index."""

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
from kvrag.loading import LOAD_THREADS, MAX_LOAD_THREADS
from kvrag.loading.streaming import StreamEstimates, Streaming
from kvrag.models.adapter import without_adapters

# A question, and a context: amounts between which a calibration's prices are a line.
_PRIOR_TOKENS = (30, 1000)


class KVEngine:
    """Answers prompts over an index at the cost of what the index does not hold.

    Any prompt is valid. Chunks of the index are recognised in its text wherever they stand; their
    stored KV is placed, repaired as the policy says, and everything else is computed. The token
    ids are those of the plain pipeline, and whatever cannot be reused is prefilled and counted.

    Parameters
    ----------
    index
        The index; its model answers.
    policy
        Which reused tokens are computed again: a name of
        `kvrag.fusion.policies.registry.POLICIES`, with parameters as in
        ``"gradual:spread=0.8"``. ``"auto"`` chooses by what `kvrag calibrate` measured. Of an
        index that stores chunks compressed nothing can be computed again: there the default
        stands for ``"none"``, and any other is refused.
    ratio
        Share of reused tokens that is computed again, and bound of ``"auto"``; None is the policy's
        default.
    boundary_tokens
        In place of it, tokens a chunk that ``"boundary"`` and ``"seam"`` compute again.
    eviction
        What is forgotten while an answer is written: a name of
        `kvrag.eviction.registry.EVICTIONS` with parameters, as in ``"corm:window=256:recent=256"``,
        or a policy; None and ``"none"`` keep the full cache.
    links
        Link tokens put behind reused chunks (KVLink): a file that ``kvrag train links`` wrote, or
        ``"off"``; None takes ``links.safetensors`` from the model's folder, where it lies there
        and fits (where it does not, prompts go without and count it).
    max_tokens
        Tokens of an answer at the most, unless a call says otherwise.
    load_threads
        Chunks whose KV is read at the same time, while what is not stored is computed layer by
        layer; 0 reads each layer before it is computed.
    ttft
        Seconds to the first token that stored KV is streamed towards: of each chunk as much is
        loaded as there is time for, or it is computed where that is quicker or as quick. None loads
        all of it.

    Raises
    ------
    LinksError
        For a file of links that is absent or damaged; at the first prompt, for links of another
        model.

    Notes
    -----
    Safe to call from several threads and with several streams open at once: forward passes take
    turns, nothing is held between two pieces of a stream.
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
        load_threads: int = LOAD_THREADS,
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
        self._load_threads = arguments.whole(load_threads, "load_threads", 0, MAX_LOAD_THREADS)
        self._estimates = StreamEstimates()
        self._buffers = BufferPool()
        self._choice(self.defaults)

    def prompt_ids(self, prompt: Prompt, *, hints: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the token ids that the plain pipeline would feed for `prompt`.

        Control strings of documents and messages are text in both, unless the index keeps them.

        Parameters
        ----------
        prompt, hints
            As in `generate`.
        """
        return self._reader.token_ids(prompt, hints)

    def fuse(self, prompt: Prompt | Request, **options: Unpack[RequestOptions]) -> FusedPrompt:
        """Return the prompt's KV and first logits, without generating.

        Transformers goes on from it: ``model.hf.generate(**fused.to_generate())``, inside ``with
        fused.answering(model):`` where there are link tokens, or the policy has a temperature or
        scale. In what it returns the answer begins at ``fused.kv.num_tokens``.

        Parameters
        ----------
        prompt, options
            As in `generate`; `max_tokens` is the room left in the buffer after the prompt.
        """
        started = time.perf_counter()
        request = Request.of(prompt, options).over(self.defaults)
        choice = self._choice(request)
        laid_out = self._reader.lay_out(request)
        return self._fuse(request, choice, laid_out, time.perf_counter() - started)

    def give_back(self, fused: FusedPrompt) -> None:
        """Let the next prompt have the memory of one that is done with; use it no more."""
        self._buffers.give_back(fused.kv)

    @property
    def stream_counts(self) -> Mapping[str, Any]:
        """Streamed chunks by level, and deadlines met and missed, since the engine was made."""
        return self._estimates.link.counts()

    def _fuse(
        self, request: Request, choice: Choice, laid_out: LaidOutPrompt, layout_seconds: float
    ) -> FusedPrompt:
        layout, open_kv = laid_out.layout, laid_out.open_kv
        assert request.max_tokens is not None  # of the engine's defaults, if of no other
        if open_kv is None:
            # A prompt that is placed stays as it is: link tokens would move what follows them.
            if self.index.compression is not None:
                layout = compact(layout, laid_out.chunks, self.index.compression)
            layout = self._links.insert(layout, request.max_tokens)
        loading = Loading(
            self._load_threads,
            self.index.tier_of if open_kv is None else None,
            None if request.ttft is None else self._streaming(request.ttft, layout_seconds),
        )
        buffer = self._take(layout, request.max_tokens)
        links = self._links.on_model if layout.links else None
        try:
            fused = fuse(
                self.index.model,
                layout,
                open_kv or self.index.open_kv,
                choice,
                buffer,
                links,
                loading,
            )
        except CompressedLostError as error:
            self._buffers.give_back(buffer)
            # What stood for these chunks has no tokens to compute instead: lay their own out.
            # Each call has a chunk less, so this ends.
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
        """Return what a prompt is streamed towards, and with what knowledge."""
        started = time.perf_counter() - layout_seconds
        try:
            calibration = self.index.calibration
        except KVRagError:
            calibration = None  # it is learnt without, from the second prompt on
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
        """Return how reused tokens are repaired, with the index's calibration where it is needed.

        Raises ParameterError where the index holds nothing that could be recomputed.
        """
        choice = request.recompute.choice()
        compression = self.index.compression
        if compression is not None and choice.name != NonePolicy.name:
            if request.recompute == Recompute(DEFAULT_POLICY):
                return Repair(NonePolicy())
            raise ParameterError(
                f"policy {request.policy!r} computes reused tokens again, but this index stores "
                f"chunks as {compression}: their rows are no tokens. Use policy 'none', or an "
                "index without compression"
            )
        return calibrated(choice, lambda: self.index.calibration)

    def _checked_eviction(self, request: Request, choice: Choice) -> EvictionPolicy | None:
        chosen = request.eviction_policy
        if chosen is None:
            return None
        if choice.scaling is not None:
            raise ParameterError(
                f"policy {choice} scales attention to reused keys, which eviction does not: leave "
                "out temperature and scale, or eviction"
            )
        check_evictable(self.index.model.hf)
        return chosen

    @property
    def links_digest(self) -> str:
        """Digest of the link tokens put behind chunks, "" without any; loads no weights."""
        return self._links.digest

    def generate(self, prompt: Prompt | Request, **options: Unpack[RequestOptions]) -> Answer:
        """Answer a prompt.

        Parameters
        ----------
        prompt
            One string, or messages (``{"role": ..., "content": ...}``) for the chat template; or
            a `Request`, which has its options with it.
        options
            The other fields of `Request`. What is left out is the engine's.

        Raises
        ------
        ParameterError
            For a value out of range or an unknown policy.
        PromptTooLongError
            When the prompt leaves no room in the context window.
        UnsupportedModelError
            For eviction from a model that attends in code of its own.
        """
        *_, last = self.stream(prompt, **options)
        assert last.answer is not None
        return last.answer

    def stream(
        self, prompt: Prompt | Request, **options: Unpack[RequestOptions]
    ) -> Iterator[AnswerDelta]:
        """Answer a prompt piece by piece; parameters and errors as in `generate`.

        Arguments are checked by the call itself, before the first piece is asked for.

        Yields
        ------
        AnswerDelta
            Pieces of text as they are certain; the last carries the whole `Answer`.
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
        # This runs when the first piece is asked for; time that passed before is the caller's.
        started = time.perf_counter() - layout_seconds
        fused = self._fuse(request, choice, laid_out, layout_seconds)
        try:
            model = self.index.model
            layout = fused.layout
            timeout_seconds = request.timeout_seconds
            assert request.max_tokens is not None
            limit = min(request.max_tokens, model.max_positions - layout.end_position)
            ends = end_ids(model.hf.generation_config, model.tokenizer)
            sampler = Sampler(request.sampling, fused.logits.device)
            text = TextStream(model.tokenizer, request.stop)
            decoder: Decoder | None = None
            # Only what was said: no penalty may count link tokens, or miss a compressed chunk's.
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
                if text.stopped:
                    finish = "stop"
                    break
                if num_generated == limit:
                    break
                if timeout_seconds is not None and time.perf_counter() - started > timeout_seconds:
                    finish = "timeout"
                    break
                token_ids = torch.cat([token_ids, token_ids.new_tensor([token])])
                # Behind the first token, which needs nothing of it.
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
        """Measure plain Transformers: seconds from the prompt's ids to its first token."""
        model = self.index.model
        ids = torch.tensor([self.prompt_ids(prompt)], device=model.device)
        with model.lock, torch.no_grad(), without_adapters(model.hf):
            started = time.perf_counter()
            int(model.hf(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax())
            return time.perf_counter() - started
