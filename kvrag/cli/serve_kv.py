"""`kvrag serve-kv`: serve the records of a store to other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag import arguments, similar
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.command import given
from kvrag.cli.listening import until_told
from kvrag.errors import ParameterError
from kvrag.store.http_protocol import TOKEN_VARIABLE, read_token
from kvrag.store.server import DEFAULT_PORT, MAX_CONNECTIONS, RecordServer, tls_context

if TYPE_CHECKING:
    from kvrag.store.base import Store


def serve_kv(
    context: typer.Context,
    index: o.OtherIndexOption = None,
    store: o.StoreOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = DEFAULT_PORT,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token that clients must send; other users may not read it. "
            f"Default: the variable {TOKEN_VARIABLE}. Without a token, only 127.0.0.1 is served.",
            show_default=False,
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificate in PEM format, for HTTPS.",
            rich_help_panel=o.TUNING,
            show_default=False,
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Key of the certificate. Default: the one in the certificate's file.",
            rich_help_panel=o.TUNING,
            show_default=False,
        ),
    ] = None,
    writable: Annotated[
        bool, typer.Option("--writable", help="Let clients also write and delete records.")
    ] = False,
    max_connections: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of connections; idle ones are closed to make room for new ones.",
            rich_help_panel=o.RESEARCH,
        ),
    ] = MAX_CONNECTIONS,
) -> None:
    """Serve stored KV over HTTP; other machines open it as http://HOST:PORT."""
    if tls_key is not None and tls_certificate is None:
        raise ParameterError("--tls-key is the key of --tls-certificate: give both")
    token = read_token(token_file)
    tls = None
    if tls_certificate is not None:
        tls = tls_context(str(tls_certificate), None if tls_key is None else str(tls_key))
    from kvrag.store.capabilities import ChecksWritable, capability
    from kvrag.store.registry import missing_folders, open_store, without_password

    if len(asked := given(context, "index", "store")) == 1:
        # A value for the other one in the settings file is meant for other commands.
        index, store = (index, None) if "index" in asked[0] else (None, store)
    if store is not None and index is not None:
        raise ParameterError("--index and --store: both name what to serve; leave one out")
    if store is not None and not writable:
        # After a typing error, an empty folder would be created and served.
        for folder in missing_folders(store):
            if folder.exists():
                raise ParameterError(
                    f"--store {without_password(store)}: expected a folder of records, found "
                    f"another kind of file, {folder}; name a folder"
                )
            raise ParameterError(
                f"--store {without_password(store)}: there is no folder {folder}"
                f"{similar.like(folder.name, similar.beside(folder))}; name one that exists, or "
                "give --writable to start with an empty one"
            )
    opened = _store_of(index) if store is None else open_store(store)
    try:
        if writable and (checks := capability(opened, ChecksWritable)):
            checks.check_writable()
        server = RecordServer(
            opened,
            host,
            port,
            token=token,
            is_writable=writable,
            tls=tls,
            max_connections=max_connections,
        )
    except BaseException as error:
        opened.close()
        if isinstance(error, OSError | UnicodeError):
            why = getattr(error, "strerror", None) or str(error)
            raise ParameterError(f"cannot listen at {host}, port {port}: {why}") from error
        raise
    rights = "reading and writing" if server.is_writable else "reading"
    until_told(server.serve_forever, server.stop, f"{server.url} ({rights})")
    opened.close()
    counts = server.counts()
    console.note(
        f"served {sum(counts['answers'].values())} requests, "
        f"{console.format_bytes(counts['bytes_sent'])}"
        f" of {without_password(opened.url)}"
    )


def _store_of(index: Path | None) -> Store:
    if index is None:
        raise ParameterError("nothing to serve: give --index DIR, or --store URL")
    from kvrag.ingest.config import KV_FOLDER, IndexConfig
    from kvrag.store.file import FileStore
    from kvrag.store.registry import open_store

    folder = arguments.resolved_path(index, "--index")
    url = IndexConfig.load(folder).store
    return open_store(url) if url else FileStore(folder / KV_FOLDER)
