"""Documents to an index: files, chunks, embeddings, KV, one catalog; and the search.

Imports `fusion` and everything below it.
Begin with `index.py`, the class `Index`; `writer.py` drives the steps of ingestion.
"""

CATALOG_NAME = "catalog.sqlite"
