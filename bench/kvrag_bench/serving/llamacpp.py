"""llama.cpp's server in a separate process, for `kvrag bench throughput`."""

from __future__ import annotations

import sys
import threading

from kvrag_bench.peers.systems import llama_cpp_options

_CONTEXT_TOKENS = 4096


def main(model: str, slots: int) -> None:
    """Serve a model in as many slots, and say where."""
    import xllamacpp

    options = llama_cpp_options(model)
    options.n_parallel, options.n_ctx, options.port = slots, slots * _CONTEXT_TOKENS, 0
    server = xllamacpp.Server(options)
    print(f"{server.listening_address}/v1", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
