"""holdfast ops export: the log of an operation or a dataset as a PROV, DCAT or STAC document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import completion
from holdfast.cli.app import fail, open_client
from holdfast.cli.operation_key import resolve_key

if TYPE_CHECKING:
    from holdfast.lineage import Event

FORMATS = ("prov", "turtle", "dcat", "stac")


@click.command()
@click.argument("key", required=False, shell_complete=completion.operation_keys)
@click.option("--dataset", metavar="NAME", shell_complete=completion.datasets,
              help="Only operations that wrote or read this dataset.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(FORMATS), default="prov", show_default=True,
              help="prov: PROV-O as JSON-LD; turtle: PROV-O as Turtle; dcat, stac: a catalogue.")  # fmt: skip
@click.pass_context
def export(context: click.Context, key: str | None, dataset: str | None, form: str) -> None:
    """Export the lineage of an operation or a dataset to stdout.

    Give either KEY or --dataset. dcat and stac contain only operations that succeeded and were not undone. Archived
    entries are not included. Exit code 1 when there is nothing to export.

    \b
    Examples:
      holdfast ops export charge:42
      holdfast ops export --dataset parcels --format stac
    """
    if (key is None) == (dataset is None):
        raise click.UsageError("give either KEY or --dataset NAME")
    with open_client(context) as client:
        key = None if key is None else resolve_key(client, key)
        events = list(client.relays.events(key, dataset=dataset))
    if not events:
        fail(f"the log has no entries of {f'operation {key!r}' if key else f'dataset {dataset!r}'}")
    try:
        click.echo(_render(form, events, dataset).rstrip("\n"))
    except LookupError as error:  # a catalogue, and nothing of it has succeeded
        fail(str(error))
    except ModuleNotFoundError as error:
        raise click.UsageError(f"{error.name} is not installed: pip install 'holdfast[prov]'") from None


def _render(form: str, events: list[Event], dataset: str | None) -> str:
    from holdfast.cli import output
    from holdfast.lineage import exports, prov

    document: Any
    if form in ("prov", "turtle"):
        document = prov.document(events)
        return prov.turtle(document) if form == "turtle" else output.to_json(document)
    if form == "dcat":
        document = exports.dcat(events, dataset)
    else:
        document = exports.stac_item(events) if dataset is None else exports.stac_collection(events, dataset)
    return output.to_json(document)
