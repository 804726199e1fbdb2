"""`kvrag bench codec`: what each codec takes, loses and costs, against CacheGen's and others."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import lists

_CODECS = (
    "raw,lossless,cachegen:1,cachegen:2,cachegen:3,cachegen:4,"
    "transform:2,transform:1,transform:0.5,transform:0.3,transform:0.15,transform:0.08"
)


def bench_codec(
    parts: Annotated[
        str,
        typer.Option(
            help="What to run, with commas: rate (codecs and baselines on real KV), designs (the "
            "codec with stages exchanged), speed (entropy coders), decode (a whole context)."
        ),
    ] = "rate,designs,speed,decode",
    sources: Annotated[
        str,
        typer.Option(
            help="Whose KV, with commas: kvrag-tiny (generated documents), minilm (the embedding "
            "model's keys and values; needs --data)."
        ),
    ] = "kvrag-tiny",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder or hub name of a decoder, as one more source; needs --data.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Texts: a JSON file in MuSiQue layout or a JSONL file in LongBench layout.",
            show_default=False,
        ),
    ] = None,
    codecs: Annotated[str, typer.Option(help="Codecs of part 'rate', with commas.")] = _CODECS,
    chunk_tokens: Annotated[
        str,
        typer.Option(help="Tokens of the chunks; each length makes rows."),
    ] = "100,250,500",
    fit_tokens: Annotated[
        int,
        typer.Option(min=256, help="Tokens to fit profiles on."),
    ] = 16_000,
    test_tokens: Annotated[int, typer.Option(min=1, help="Other tokens, to measure.")] = 5_000,
    random_shape: Annotated[
        str,
        typer.Option(help="Part 'decode': random weights in the shape of this model."),
    ] = "qwen2.5-0.5b",
    decode_codecs: Annotated[
        str, typer.Option(help="Codecs of part 'decode', with commas.")
    ] = "transform:2,transform:1,transform:0.5,lossless,raw",
    group_layers: Annotated[
        str,
        typer.Option(
            help="Part 'decode': layers that share a basis, with commas; 0 means as many "
            "as the codec takes."
        ),
    ] = "4,8",
    context_chunks: Annotated[
        int,
        typer.Option(min=1, help="Part 'decode': chunks of the context."),
    ] = 10,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Part 'decode': tokens of each.")
    ] = 500,
    symbol_rows: Annotated[
        int,
        typer.Option(min=1, help="Part 'speed': rows of the coded matrix."),
    ] = 1000,
    symbol_tokens: Annotated[
        int,
        typer.Option(min=1, help="Part 'speed': symbols of each row."),
    ] = 500,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing; medians count.")] = 7,
    as_json: o.JsonOption = False,
) -> None:
    """Measure bits, error and speed of codecs against CacheGen's public scheme and other coders."""
    named = (*lists.names(sources, "--sources"), *((model,) if model else ()))
    lengths = lists.numbers(chunk_tokens, "--chunk-tokens")
    groups = lists.numbers(group_layers, "--group-layers", 0)
    wanted = lists.names(parts, "--parts")
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.codec.options import CodecBenchOptions

    quiet_libraries()
    options = CodecBenchOptions(
        parts=wanted,
        sources=named,
        data=data,
        codecs=lists.names(codecs, "--codecs"),
        chunk_tokens=lengths,
        fit_tokens=fit_tokens,
        test_tokens=test_tokens,
        shape=random_shape,
        decode_codecs=lists.names(decode_codecs, "--decode-codecs"),
        group_layers=groups,
        context_chunks=context_chunks,
        context_tokens=context_tokens,
        symbol_rows=symbol_rows,
        symbol_tokens=symbol_tokens,
        repeats=repeats,
    )
    from kvrag_bench.codec import run

    with console.progress("measuring") as say:
        rows = list(run.run_codec_bench(options, on_progress=say))
    if as_json:
        console.print_json(rows)
    else:
        from kvrag_bench.cli.codec_tables import print_rows

        print_rows(rows)
