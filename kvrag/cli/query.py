"""`kvrag query`: answer one question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.command import given
from kvrag.fusion.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.request import Request

# They set how reused KV is repaired and how tokens are sampled; plain prefill does neither.
_NOT_PLAIN = (
    *("policy", "ratio", "boundary_tokens", "eviction", "links", "ttft", "store_patience"),
    "never_slower",
    *("temperature", "seed"),
)


def query(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="The question.")],
    index: o.IndexOption = o.DEFAULT_INDEX,
    model: o.ModelOption = None,
    device: o.DeviceOption = None,
    compute: o.ComputeOption = None,
    store: o.StoreOption = None,
    top_k: o.TopKOption = o.DEFAULT_TOP_K,
    filter: o.FilterOption = None,
    rerank: o.RerankOption = None,
    embedding: o.EmbeddingOption = None,
    policy: o.PolicyOption = DEFAULT_POLICY,
    ratio: o.RatioOption = None,
    boundary_tokens: o.BoundaryTokensOption = None,
    eviction: o.EvictionOption = None,
    links: o.LinksOption = None,
    ttft: o.TTFTOption = None,
    store_patience: o.StorePatienceOption = None,
    never_slower: o.NeverSlowerOption = True,
    max_tokens: o.MaxTokensOption = o.DEFAULT_MAX_TOKENS,
    temperature: o.TemperatureOption = 0.0,
    seed: o.SeedOption = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Answer by plain prefill instead, greedily, for comparison."),
    ] = False,
    no_chat: o.NoChatOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Answer one question from the index, and show the sources and a report."""
    from kvrag.cli.answering import (
        Outcome,
        Settings,
        answer,
        as_turn,
        make_engine,
        print_below,
        retrieve,
    )
    from kvrag.cli.opening import load_reranker, open_index, warm_up
    from kvrag.errors import ParameterError

    if not arguments.text(question, "the question").strip():
        raise ParameterError("the question is empty: give one in quotes")
    if plain and (useless := given(context, *_NOT_PLAIN)):
        raise ParameterError(
            "--plain answers by plain prefill, greedily: it has no use for "
            f"{', '.join(useless)}; leave one or the other out"
        )
    settings = Settings(
        top_k=top_k,
        policy=policy,
        ratio=ratio,
        boundary_tokens=boundary_tokens,
        eviction=eviction,
        links=links,
        ttft=ttft,
        store_patience=store_patience,
        never_slower=never_slower,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        use_chat_template=not no_chat,
        reranker=load_reranker(rerank),
        filter=filter,
    )
    with open_index(index, model, device, store, embedding=embedding, compute=compute) as opened:
        engine = make_engine(opened, settings)
        warm_up(opened)
        request, seconds = retrieve(opened, [as_turn(question)], settings)
        on_text = console.AnswerText(quiet=as_json)
        if plain:
            _answer_plainly(engine, question, request, seconds, on_text)
            return
        outcome = Outcome(question, answer(engine, request, on_text), seconds)
        on_text.end()
        if as_json:
            console.print_json(outcome.to_dict())
        else:
            print_below(outcome)


def _answer_plainly(
    engine: KVEngine,
    question: str,
    request: Request,
    seconds: float,
    on_text: console.AnswerText,
) -> None:
    from kvrag.cli.plain import answer_plainly

    token_ids = engine.prompt_ids(request.prompt, hints=request.hints)
    max_tokens = request.max_tokens or o.DEFAULT_MAX_TOKENS
    answered = answer_plainly(engine.index.model, token_ids, max_tokens, request.stop, on_text)
    on_text.end()
    if on_text.quiet:
        fields = console.plain(answered)
        console.print_json(
            {
                "question": question,
                "answer": fields.pop("text"),
                "policy": "plain",
                **fields,
                "retrieval_seconds": seconds,
            }
        )
    else:
        ttft = console.format_seconds(answered.ttft_seconds)
        console.out().print(
            f"  first token {ttft} | {answered.prompt_tokens} prompt tokens, plain prefill",
            style="dim",
        )
