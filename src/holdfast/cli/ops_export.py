"""holdfast ops export: the log of an operation or a dataset as a PROV, DCAT or STAC document."""

from __future__ import annotations

import json
from pathlib import Path
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
@click.option("--describe", "file", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="JSON with license, geometry, assets, … of datasets, for dcat and stac.")  # fmt: skip
@click.pass_context
def export(context: click.Context, key: str | None, dataset: str | None, form: str, file: str | None) -> None:
    """Export the lineage of an operation or a dataset to stdout.

    Give either KEY or --dataset. dcat and stac contain only operations that succeeded and were not undone. Archived
    entries are not included. Exit code 1 when there is nothing to export.

    FILE has the form {"parcels": {"license": "CC-BY-4.0", "bbox": [9, 46, 17, 49], "assets": {"data": {"href": …}}}}.
    The fields are title, description, license, geometry, bbox, assets and links, as in STAC.

    \b
    Examples:
      holdfast ops export charge:42
      holdfast ops export --dataset parcels --format stac --describe parcels.json
    """
    if (key is None) == (dataset is None):
        raise click.UsageError("give either KEY or --dataset NAME")
    if file is not None and form not in ("dcat", "stac"):
        raise click.UsageError("--describe is for --format dcat and --format stac")
    descriptions = None if file is None else _read(file)
    with open_client(context) as client:
        key = None if key is None else resolve_key(client, key)
        events = list(client.relays.events(key, dataset=dataset))
    if not events:
        fail(f"the log has no entries of {f'operation {key!r}' if key else f'dataset {dataset!r}'}")
    try:
        click.echo(_render(form, events, dataset, descriptions).rstrip("\n"))
    except LookupError as error:  # a catalogue, and nothing of it has succeeded
        fail(str(error))
    except ValueError as error:
        raise click.UsageError(f"{file}: {error}") from None
    except ModuleNotFoundError as error:
        raise click.UsageError(f"{error.name} is not installed: pip install 'holdfast[prov]'") from None


def _read(file: str) -> Any:
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from None


def _render(form: str, events: list[Event], dataset: str | None, descriptions: Any) -> str:
    from holdfast.cli import output
    from holdfast.lineage import exports, prov

    document: Any
    if form in ("prov", "turtle"):
        document = prov.document(events)
        return prov.turtle(document) if form == "turtle" else output.to_json(document)
    if form == "dcat":
        document = exports.dcat(events, dataset, descriptions)
    elif dataset is None:
        document = exports.stac_item(events, descriptions)
    else:
        document = exports.stac_collection(events, dataset, descriptions)
    return output.to_json(document)
