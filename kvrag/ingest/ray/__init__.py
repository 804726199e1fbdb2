"""Ingestion on many machines with Ray Data (`kvrag[ray]`): `ingest` and `RayRunner`."""

from kvrag.ingest.ray.driver import RayRunner, ingest
from kvrag.ingest.ray.options import RayOptions

__all__ = ["RayOptions", "RayRunner", "ingest"]
