"""`kvrag train`: one file a command."""

import typer

from kvrag.cli.command import lazy_group

COMMANDS = {
    "links": "kvrag_train.cli.links:train_links",
    "anchors": "kvrag_train.cli.anchors:train_anchors",
}

app = typer.Typer(
    name="train",
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train what kvrag can use beside a model.",
)
