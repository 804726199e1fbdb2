"""`kvrag train`: one file a command."""

import typer

from kvrag.cli.command import lazy_group
from kvrag.codec.names import COMPRESSION_GONE

COMMANDS = {
    "links": "kvrag_train.cli.links:train_links",
    "writer": "kvrag_train.cli.writer:train_writer",
}
GONE = {"anchors": f"is gone. {COMPRESSION_GONE}"}

app = typer.Typer(
    name="train",
    cls=lazy_group(COMMANDS, gone=GONE),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train what kvrag can use beside a model.",
)
