"""Documents into an index, which is opened or created, with a bar and a report."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.opening import load_object, quiet_libraries
from kvrag.errors import IndexNotFoundError, ParameterError

if TYPE_CHECKING:
    from kvrag.codec.profile import Profile
    from kvrag.ingest.embedding import Embedding
    from kvrag.ingest.index import Index
    from kvrag.ingest.report import IngestProgress, IngestReport


class IngestBar:
    """Says how far an ingestion is; its `update` is an `on_progress` of `Index.add`.

    Parameters
    ----------
    place
        The index's folder, for the free space on its disk.
    say
        Shows it, as `kvrag.cli.console.progress` does.
    """

    def __init__(self, place: Path, say: console.Say) -> None:
        self._place = place
        self._say = say
        self._stage = ""

    def update(self, progress: IngestProgress) -> None:
        """Show the progress; show an estimate once, before anything is written."""
        if progress.stage == "profile":
            self._say(f"fitting the codec: {progress.doing}")
            return
        what = "reading" if progress.stage == "read" else "computing"
        done, total, noun = progress.num_documents_done, progress.num_documents, "documents"
        speed = ""
        if progress.stage != "read":
            if self._stage != progress.stage and progress.num_tokens:
                self._say_estimate(progress)
            if progress.num_tokens:  # otherwise all KV is stored already
                done, total, noun = progress.num_tokens_done, progress.num_tokens, "tokens"
                speed = _speed(progress)
            elif not total:
                return
        self._stage = progress.stage
        self._say(f"{what}: {done:,} of {total:,} {noun}{speed}", done / max(total, 1))

    def update_first(self, num_done: int, num_chunks: int) -> None:
        """Show how many chunks have their record for a prompt's first place."""
        self._say(f"first places: {num_done:,} of {num_chunks:,} chunks", num_done / num_chunks)

    def _say_estimate(self, progress: IngestProgress) -> None:
        size = console.format_bytes(progress.size_bytes_estimate)
        free = console.format_bytes(shutil.disk_usage(self._place).free)
        # By `print`, which rich's bar lets through above itself.
        print(
            f"{progress.num_tokens:,} tokens to compute, about {size} of KV to write, {free} free",
            file=sys.stderr,
        )


def _speed(progress: IngestProgress) -> str:
    if progress.eta_seconds is None:
        return ""
    left = f", {console.format_seconds(progress.eta_seconds)} left" if progress.eta_seconds else ""
    return f", {progress.tokens_per_second:,.0f} tokens/s{left}"


@dataclass(frozen=True)
class Target:
    """The index that documents go into, and what it is opened or made with.

    Attributes
    ----------
    model
        A name of 'kvrag models', ollama:NAME, a GGUF file, or the folder or hub name of a Hugging
        Face decoder. Default for a new index: the only model that is installed.
    """

    index: o.IndexOption = o.DEFAULT_INDEX
    model: Annotated[str | None, typer.Option("--model", "-m")] = None
    device: o.DeviceOption = None
    store: o.StoreOption = None


def index_into(
    target: Target,
    documents: Iterable[Any],
    settings: Mapping[str, Any],
    *,
    profile: Profile | None = None,
    dry_run: bool,
    as_json: bool,
    first_records: bool = False,
    more: Callable[[IngestReport], Mapping[str, Any]] = lambda _: {},
    **adding: Any,
) -> IngestReport:
    """Add documents to an index, which is created if it does not exist, and print the report.

    `settings` has fields of `IndexSettings` by name, of which None means the default, or what an
    existing index has. `more` returns what the JSON of a report holds in addition; `adding` are
    further arguments of `Index.add`. Raises ParameterError, before anything is written, for a store
    that is unknown or ends with the command.
    """
    from kvrag.ingest.encoders import check_lasting
    from kvrag.store.registry import check_kind, without_password
    from kvrag.weights.cache import check_model

    if (store := target.store) is not None:
        if store.split("|")[-1].startswith("memory:"):
            raise ParameterError(
                f"--store {without_password(store)}: memory is lost when the command ends; give a "
                "persistent store, with memory as a tier before it"
            )
        check_kind(store)
    custom, name = _embedding(settings.get("embedding"))
    asked = {**settings, "embedding": name}
    asked = {name: value for name, value in asked.items() if value is not None}
    quiet_libraries()
    if target.model is not None:
        check_model(target.model)
    with tempfile.TemporaryDirectory(prefix="kvrag-") as scratch:
        folder = Path(scratch) if dry_run else None
        opened = _open_or_create(target, asked, profile, custom, folder)
        has_bar = adding.get("runner") is None  # Ray has its own
        with opened, console.progress("reading", has_bar=has_bar) as say:
            bar = IngestBar(opened.path, say)
            check_lasting(opened.store)  # also for an index that was created elsewhere
            is_new = not any(opened.catalog.documents.counts())
            report = opened.add(documents, dry_run=dry_run, on_progress=bar.update, **adding)
            if first_records and not dry_run:
                num_made = opened.on_demand.make_all(bar.update_first)
                console.note(f"first places: {console.count(num_made, 'record')} stored")
            # Once for an index, and without how a longer text is read, which `doctor` explains.
            is_told = is_new and bool(report.added)
            embedding = opened.embedding.described().partition(": ")[0] if is_told else ""
    if as_json:
        console.print_json({**console.plain(report), **more(report)})
    else:
        _print_report(report)
        if embedding:
            console.write(f"embedding: {embedding}\n")
    return report


def _embedding(name: str | None) -> tuple[Embedding | None, str | None]:
    """Return the object that ``MODULE:NAME`` names, or else the name."""
    if name is None or ":" not in name or Path(name).exists():
        return None, name
    from kvrag.ingest.embedding import get_embedding

    return get_embedding(load_object(name, "--embedding")), None


def _print_report(report: IngestReport) -> None:
    """Print what an ingestion did."""
    for failed in report.failed:
        place = console.shown_name(failed.source)
        reason = failed.reason.removeprefix(failed.source).lstrip(":, ")
        print(f"left out: {place}: {console.one_line(reason)}", file=sys.stderr)
    size = console.format_bytes(report.size_bytes)
    if report.dry_run:
        work = (
            f"would compute {console.count(report.num_tokens_computed, 'token')} "
            f"and write about {size} of KV; nothing was written"
        )
    else:
        work = (
            f"{console.count(report.num_tokens_computed, 'token')} computed, {size} of KV written "
            f"in {console.format_seconds(report.seconds)}"
        )
        if report.num_tokens_computed:
            work += f" ({report.tokens_per_second:,.0f} tokens/s)"
    if report.num_context_tokens:
        tokens = console.count(report.num_context_tokens, "token")
        work += f"\n{tokens} of context computed with them, not stored"
    if report.control_strings:
        num_strings = sum(report.control_strings.values())
        work += (
            f"\nread as text: {console.count(num_strings, 'control string')} of the model, in "
            f"{console.count(len(report.control_strings), 'document')}"
        )
    console.write(
        f"documents: {len(report.added):,} new, {len(report.changed):,} changed, "
        f"{len(report.removed):,} removed, {len(report.unchanged):,} unchanged, "
        f"{len(report.failed):,} left out\n{work}\n"
    )
    if report.note:
        console.note(report.note)


def _tell_default_embedding() -> None:
    """Say so if the new index gets the plainer embedding."""
    from kvrag.ingest.embedding import MINILM, default_embedding

    default = default_embedding()
    if default != MINILM:
        console.note(
            f"no sentence-transformers here: the new index compares words (embedding {default}); "
            "pip install 'kvrag[embed]' before, and it compares meanings"
        )


def _only_model() -> str:
    """Return the model that is installed, if it is one. Raises ParameterError."""
    from kvrag.weights.cache import ready_models
    from kvrag.weights.named import NAMED_MODELS

    found = ready_models()
    if len(found) == 1:
        return found[0]
    choice = " or ".join(f"--model {name}" for name in found)
    if not found:
        first = NAMED_MODELS[0].name
        choice = f"'kvrag models pull {first}', then --model {first}; or another --model"
    raise ParameterError(
        f"a new index needs a model, and {len(found) or 'none'} of 'kvrag models' are installed: "
        f"{choice} (a GGUF file, ollama:NAME, a folder, a hub name)"
    )


def _open_or_create(
    target: Target,
    settings: Mapping[str, Any],
    profile: Profile | None,
    embedding: Embedding | None,
    scratch: Path | None,
) -> Index:
    """Open the index, or create it; a dry run creates it in `scratch` instead."""
    from kvrag.ingest.embedding import HASHING, HashingEmbedding
    from kvrag.ingest.index import Index
    from kvrag.ingest.profiles import read_writer

    path, model, store = target.index, target.model, target.store
    given: dict[str, Any] = {"device": target.device, "store": store, "embedding": embedding}
    try:
        opened = Index.open(path, model=model, mend=not scratch, **given)
    except IndexNotFoundError:
        if model is None:
            model = _only_model()
            console.note(f"no --model given: the new index uses {model}, which is installed here")
        if "embedding" not in settings and embedding is None:
            _tell_default_embedding()
        folder = scratch / "index" if scratch is not None else path
        return Index.create(folder, model=model, profile=profile, **{**given, **settings})
    try:
        if store is not None and opened.store.url != opened.config.store:
            raise ParameterError(
                f"the index at {path} keeps its KV in {opened.config.store or 'its own folder'}, "
                f"asked for {opened.store.url}: leave --store out, or make a new index"
            )
        if profile is not None and profile.hash != opened.config.profile:
            raise ParameterError(
                f"the index at {path} exists already, and --profile is for a new index: leave it "
                "out, or use 'kvrag recode --profile'"
            )
        for name, wanted in settings.items():
            recorded = getattr(opened.config, name)
            accepted, asked = {recorded}, {wanted}
            if name == "context":  # with or without its number of tokens
                recorded = str(opened.config.chunk_context)
                accepted.add(recorded)
            if name == "embedding":  # a name, or a folder
                asked.add(str(arguments.resolved_path(wanted, "--embedding")))
            if name == "writer" and recorded:  # its copy is used, if it is of this file
                asked = {read_writer(wanted)[1]}
            if name == "embedding" and recorded == HashingEmbedding.name:
                accepted.add(HASHING)
            if accepted.isdisjoint(asked):
                raise ParameterError(
                    f"the index at {path} was made with {name}={recorded or 'none'}, asked for "
                    f"{wanted}: leave the option out, or make a new index in another folder"
                    + (" ('kvrag recode' changes the codec)" if name == "codec" else "")
                )
        if model is not None:
            _check_model(opened, model)
    except BaseException:
        opened.close()
        raise
    return opened


def _check_model(opened: Index, model: str) -> None:
    """Raise an error if a model is not the index's, even if nothing will be computed with it."""
    from kvrag.models.references import resolve_model

    # The recorded model is not loaded here: its weights are checked when they are loaded.
    if resolve_model(model) == opened.config.model or model == opened.config.model:
        _ = opened.tokenizer
    else:
        with console.working("loading the model"):
            _ = opened.model
