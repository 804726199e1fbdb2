"""`kvrag doctor`: check this machine and an index. Each check returns findings and never raises."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import kvrag
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.console import EXIT_FAILURE
from kvrag.cli.opening import quiet_libraries
from kvrag.errors import KVRagError, ParameterError
from kvrag.plugins import described, registered

if TYPE_CHECKING:
    from kvrag.ingest.index import Index
    from kvrag.models.kv_model import KVModel

Status = Literal["ok", "note", "warning", "problem"]

_OPTIONAL = {
    "sentence-transformers": "kvrag[embed]",
    "langchain-core": "kvrag[langchain]",
    "llama-index-core": "kvrag[llama-index]",
    "pypdfium2": "kvrag[ingest]",
    "markitdown": "kvrag[docs]",
    "tree-sitter": "kvrag[code]",
    "kvrag-bench": "kvrag[bench]",
}
_REFERENCE_COSTS = (
    "reference: numpy and torch compute in place of the compiled kernels. "
    "Attention takes 3 to 12 times as long, and decoding KV of a codec other than raw hundreds of "
    "times as long (docs/install.md)"
)
_REFERENCE_REMEDY = (
    "unset KVRAG_ISA if it is set; else install kvrag's wheel for this platform, or install from "
    "source with a C++ compiler: pip install --force-reinstall --no-deps --no-binary kvrag kvrag"
)
_LOW_DISK_BYTES = 2 * 1024**3
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    name, status, detail
        What was checked, its status, and what was found.
    remedy
        What to do about it; empty when nothing needs doing.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def doctor(
    index: o.IndexOption = None,
    model: Annotated[str | None, typer.Option("--model", "-m")] = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check versions, processor, disk, index and model; exit 1 if there is a problem.

    Parameters
    ----------
    model
        Model to check: folder, hub name or 'kvrag-tiny'. Default: the index's model.
    """
    with console.working("checking"):
        findings = check_all(index, model, store)
    failed = any(finding.status == "problem" for finding in findings)
    if as_json:
        console.print_json({"ok": not failed, "findings": findings})
    else:
        told = [
            (one, one.detail + (f"\n-> {one.remedy}" if one.remedy else "")) for one in findings
        ]
        rows = [(one.status, one.name, detail) for one, detail in told]
        console.print_table({"": "text", "checked": "text", "found": "folded"}, rows)
    if failed:
        raise typer.Exit(EXIT_FAILURE)


def check_all(index: Path | None, model: str | None, store: str | None = None) -> list[Finding]:
    """Run every check; check the index and the model only if they are given."""
    findings = [*_versions(), *_plugins(), *_processor(), _offline()]
    findings.append(_disk(index if index is not None else Path.cwd()))
    reference = model
    if index is not None:
        index_findings, recorded = _index(index, store)
        findings += index_findings
        reference = reference or recorded
    if reference is not None:
        findings += _model(reference)
    return findings


def _embedding(index: Index) -> Finding:
    """Say how much of a chunk the index's embedding reads."""
    try:
        return Finding("embedding", "ok", index.embedding.described())
    except (KVRagError, OSError) as error:
        return Finding("embedding", "problem", str(error), "pass the one it was made with")


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("python", "ok", f"{python} on {platform.system()} {platform.machine()}")
    yield Finding("kvrag", "ok", kvrag.__version__)
    for name, wanted in _required():
        remedy = f"pip install '{name}>={wanted}'"
        found = _package(name, "problem", "not installed", remedy)
        if found.status == "ok" and _leading_numbers(found.detail) < _leading_numbers(wanted):
            detail = f"{found.detail}, too old: {wanted} is needed"
            found = Finding(name, "problem", detail, remedy)
        yield found
    for name, extra in _OPTIONAL.items():
        yield _package(name, "note", "not installed (optional)", f"pip install '{extra}'")


def _required() -> list[tuple[str, str]]:
    """Return what kvrag's own distribution needs, with the oldest version; extras aside."""
    try:
        declared = [one for one in metadata.requires("kvrag") or () if "extra ==" not in one]
    except metadata.PackageNotFoundError:  # a checkout on the path
        return []
    return re.findall(r"^([\w-]+).*>=([\d.]+)", "\n".join(declared), re.MULTILINE)


def _package(name: str, status: Status, absent: str, remedy: str) -> Finding:
    """Return a package's version, or a finding that says that it is absent."""
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, status, absent, remedy)


def _leading_numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)[:2]]


def _plugins() -> Iterator[Finding]:
    """Check what other distributions register."""
    try:
        from kvrag.codec.names import LEVELS, PLAIN
        from kvrag.codec.registry import get_codec
        from kvrag.fusion.policies.registry import POLICIES, parameters_of
        from kvrag.store.registry import REMOTE, store_class
    except ImportError as error:
        # Another finding names what is missing.
        yield Finding("plugins", "problem", f"cannot be checked: {error}")
        return

    tables: list[tuple[str, Collection[str], Callable[[str], object]]] = [
        (REMOTE.group, REMOTE.built_in, store_class),
        (POLICIES.group, POLICIES.built_in, parameters_of),
        (PLAIN.group, [*PLAIN.built_in, *LEVELS], get_codec),
    ]
    for group, own, check in tables:
        for point in registered(group):
            if point.name in own:
                detail = f"{described(point)} is ignored: the name is kvrag's own"
                yield Finding(group, "warning", detail, "rename it in its distribution")
                continue
            try:
                check(point.name)
            except KVRagError as error:
                yield Finding(group, "problem", str(error))
            else:
                yield Finding(group, "ok", described(point))


def _processor() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "problem", f"cannot be imported: {error}", "reinstall torch")
        return
    from kvrag.loading.threads import num_cores

    cores, num_threads = num_cores(), torch.get_num_threads()
    detail = f"torch uses {num_threads} threads on {cores} cores"
    remedy = f"set OMP_NUM_THREADS={cores}: more threads than cores slow each other down"
    is_much = num_threads > cores
    yield Finding("threads", "warning" if is_much else "ok", detail, remedy if is_much else "")
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("processor", "ok", ", ".join([capability, *_cpu_flags()]))
    yield _kernels()
    if torch.cuda.is_available():
        yield Finding("accelerator", "ok", torch.cuda.get_device_name())
    else:
        yield Finding("accelerator", "note", "none; models run on the processor")


def _kernels() -> Finding:
    """Say which of kvrag's compiled kernels run, or what it costs that none do."""
    try:
        from kvrag.native.kernels import REFERENCE, instruction_set, instruction_sets
    except ImportError as error:
        remedy = "reinstall kvrag"
        return Finding("kernels", "problem", f"cannot be imported: {error}", remedy)
    if instruction_set() == REFERENCE:
        return Finding("kernels", "warning", _REFERENCE_COSTS, _REFERENCE_REMEDY)
    built = ", ".join(instruction_sets())
    used = f"{instruction_set()}, for the codec and for attention"
    return Finding("kernels", "ok", f"{used} (this processor runs: {built})")


def _cpu_flags() -> list[str]:
    wanted = (
        *("avx2", "fma", "f16c", "avx512f", "avx512_vbmi2", "avx512_bf16", "avx512_vnni"),
        *("amx_bf16", "asimd"),
    )
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = next((x for x in text.splitlines() if x.startswith(("flags", "Features"))), "")
    found = set(line.partition(":")[2].split())
    return [flag for flag in wanted if flag in found]


def _offline() -> Finding:
    forced = [name for name in _OFFLINE_VARIABLES if os.environ.get(name, "0") not in ("", "0")]
    used = "used only to download a model given by hub name and not cached"
    detail = f"never used ({', '.join(forced)} is set)" if forced else used
    return Finding("network", "ok", detail)


def _disk(place: Path) -> Finding:
    existing = place.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    detail = f"{console.format_bytes(free)} free at {existing}"
    if free < _LOW_DISK_BYTES:
        remedy = "free space, or move the index to another disk; `kvrag gc` deletes unused records"
        return Finding("disk", "warning", detail, remedy)
    return Finding("disk", "ok", detail)


def _index(path: Path, store: str | None) -> tuple[list[Finding], str | None]:
    """Return findings about the index, and the model reference that it records."""
    try:
        from kvrag.ingest.index import Index

        with Index.open(path, store=store) as index:
            stats = index.stats()
            numbers = (stats.num_documents, stats.num_chunks, stats.num_tokens)
            nouns = ("document", "chunk", "token")
            held = ", ".join(map(console.count, numbers, nouns))
            found = Finding("index", "ok", f"{held}, {console.format_bytes(stats.size_bytes)}")
            if stats.num_chunks == 0:
                remedy = f"kvrag ingest PATH... --index {shlex.quote(str(path))}"
                found = Finding("index", "warning", "empty", remedy)
            findings = [found, _embedding(index)]
            reference = str(index.config.model)
        if not os.access(path, os.W_OK):
            remedy = "give yourself write access to ingest into it"
            findings.append(Finding("index", "warning", "read-only: queries work", remedy))
        return findings, reference
    except (KVRagError, OSError, ImportError) as error:
        return [Finding("index", "problem", str(error))], None  # It says what to do.


def _model(reference: str) -> list[Finding]:
    """Load the model's tokenizer and weights, and check that kvrag supports it."""
    try:
        from kvrag.models.kv_model import KVModel

        quiet_libraries()
        model = KVModel.load(reference)
    except (KVRagError, OSError, ImportError) as error:
        remedy = "pass --model with a supported model's folder"
        return [Finding("model", "problem", str(error), remedy)]
    spec = model.chunk_spec  # what is stored, whatever this processor computes in
    detail = (
        f"{model.name}: {model.decoder.config.model_type}, {spec.num_layers} layers, "
        f"{str(spec.dtype).removeprefix('torch.')}, {model.max_positions:,} positions, "
        f"{model.why_whole or console.format_bytes(spec.bytes_per_token) + ' of KV per token'}"
    )
    return [Finding("model", "ok", detail), _compute(model)]


def _compute(model: KVModel) -> Finding:
    """Say what the model's linear layers compute in, and what ``--compute auto`` would take."""
    from kvrag.arguments import AUTO
    from kvrag.models.compute import fastest, measured, resolved_compute

    own = model.compute
    try:
        resolved_compute(model.decoder, "float32" if own != "float32" else "bfloat16")
    except ParameterError as error:
        return Finding("compute", "ok", str(error))
    seconds = measured(model.decoder)
    times = ", ".join(f"{name} {taken * 1e3:.2f} ms" for name, taken in seconds.items())
    chosen = fastest(own, seconds)
    return Finding(
        "compute", "ok", f"{own}; --compute {AUTO} would take {chosen} (a layer: {times})"
    )
