"""`kvrag bench`: one file a command."""

import typer

from kvrag.cli.command import lazy_group

COMMANDS = {
    "ttft": "kvrag_bench.cli.ttft:bench_ttft",
    "launches": "kvrag_bench.cli.launches:bench_launches",
    "decode": "kvrag_bench.cli.decode:bench_decode",
    "batch": "kvrag_bench.cli.batch:bench_batch",
    "session": "kvrag_bench.cli.session:bench_session",
    "ingest": "kvrag_bench.cli.ttft:bench_ingest",
    "quality": "kvrag_bench.cli.quality:bench_quality",
    "codec": "kvrag_bench.cli.codec:bench_codec",
    "store": "kvrag_bench.cli.store:bench_store",
    "load": "kvrag_bench.cli.load:bench_load",
    "stream": "kvrag_bench.cli.stream:bench_stream",
    "pml": "kvrag_bench.cli.pml:bench_pml",
    "eviction": "kvrag_bench.cli.eviction:bench_eviction",
    "vllm": "kvrag_bench.cli.vllm:bench_vllm",
    "retrieval": "kvrag_bench.cli.retrieval:bench_retrieval",
    "words": "kvrag_bench.cli.words:bench_words",
    "citations": "kvrag_bench.cli.citations:bench_citations",
    "vectors": "kvrag_bench.cli.vectors:bench_vectors",
    "exact": "kvrag_bench.cli.exact:bench_exact",
    "recognition": "kvrag_bench.cli.recognition:bench_recognition",
    "serve": "kvrag_bench.cli.serve:bench_serve",
    "throughput": "kvrag_bench.cli.throughput:bench_throughput",
    "fronts": "kvrag_bench.cli.fronts:bench_fronts",
    "gaps": "kvrag_bench.cli.gaps:bench_gaps",
    "peers": "kvrag_bench.cli.peers:bench_peers",
    "regress": "kvrag_bench.cli.regress:bench_regress",
}
_GONE = {"attention": "is gone: 'kvrag bench ttft' and 'kvrag bench decode' time whole layers"}

app = typer.Typer(
    name="bench",
    cls=lazy_group(COMMANDS, gone=_GONE),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure kvrag against full prefill.",
)
