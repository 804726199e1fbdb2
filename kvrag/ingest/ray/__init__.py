"""Ingestion on many machines with Ray Data (`kvrag[ray]`): `ingest` and `RayRunner`."""

from kvrag.ingest.ray.driver import RayOptions, RayRunner, ingest

__all__ = ["RayOptions", "RayRunner", "ingest"]
