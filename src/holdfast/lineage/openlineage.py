"""A sink that writes OpenLineage run events: to a file, to the console, by HTTP, or through a transport of the client.

A run is an attempt of an operation, so its id does not change when an event is sent again. Values that OpenLineage has
no field for are in facets of our own, whose schemas are beside this module. The retries of the OpenLineage client are
off: the relay retries, because it knows which events were taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from holdfast import SinkDown
from holdfast.extras import missing_extra
from holdfast.lineage import Event
from holdfast.lineage.jsonlines import append

try:
    import attr
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import RunFacet, error_message_run
    from openlineage.client.serde import Serde
    from openlineage.client.transport.http import HttpConfig, HttpTransport
    from openlineage.client.transport.transport import Transport
    from requests import HTTPError, RequestException, Response, Session
    from requests.utils import get_auth_from_url, urldefragauth
    from urllib3.util import Retry

    from holdfast.lineage.requests_deadline import DeadlineAdapter
except ModuleNotFoundError as error:
    raise missing_extra(error, "openlineage") from None

PRODUCER = f"urn:holdfast:{version('holdfast')}"
SCHEMA = "urn:holdfast:openlineage:1-0-0"
SCHEMA_FILE = Path(__file__).parent / "schemas" / "openlineage.json"
_STATES = {"MESSAGE": RunState.OTHER, "UNDONE": RunState.OTHER}
_DOWN = (401, 403, 404, 408, 425, 429)
"""Statuses that concern the server, the credentials or the URL, and not the event."""


@attr.define
class IdempotencyRunFacet(RunFacet):
    eventId: str  # noqa: N815
    key: str
    number: int
    attempt: int
    checksum: str | None = None
    paramsHash: str | None = None  # noqa: N815
    resultHash: str | None = None  # noqa: N815

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/IdempotencyRunFacet"


@attr.define
class LockRunFacet(RunFacet):
    fence: int
    heldSeconds: float | None = None  # noqa: N815

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/LockRunFacet"


@attr.define
class GovernanceRunFacet(RunFacet):
    sovereigntyEvent: bool  # noqa: N815
    actor: str | None = None
    justification: str | None = None

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/GovernanceRunFacet"


@attr.define
class ContractRunFacet(RunFacet):
    name: str
    version: str
    verdict: str | None = None

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/ContractRunFacet"


@attr.define
class EnergyRunFacet(RunFacet):
    energyJoules: float  # noqa: N815
    carbonGrams: float  # noqa: N815
    cpuSeconds: float  # noqa: N815
    wallSeconds: float  # noqa: N815
    estimate: bool
    method: str
    parameters: dict[str, Any]

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/EnergyRunFacet"


@attr.define
class MessageRunFacet(RunFacet):
    topic: str
    payload: str
    """As JSON text: the OpenLineage client drops null values."""

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/MessageRunFacet"


class OpenLineage:
    """``to``: a file, ``-`` for the console, an ``http://`` or ``https://`` URL, or a transport of the OpenLineage
    client. ``namespace``: of jobs and datasets. ``timeout``: seconds for a whole HTTP response."""

    def __init__(self, to: str | Path | Transport, *, namespace: str = "holdfast", timeout: float = 5.0) -> None:
        self._namespace, self._to = namespace, to
        if isinstance(to, str) and to.startswith(("http://", "https://")):
            session, adapter = Session(), DeadlineAdapter(max_retries=Retry(0))
            for scheme in ("http://", "https://"):  # both: a redirect may change it
                session.mount(scheme, adapter)
            if any(auth := get_auth_from_url(to)):
                session.auth = auth  # not in the URL: errors quote it, and are logged and stored
            config = HttpConfig(urldefragauth(to), timeout=timeout, session=session, adapter=adapter)
            self._to = HttpTransport(config)

    def publish(self, events: Sequence[Event]) -> None:
        run_events = [run_event(event, self._namespace) for event in events]
        if isinstance(self._to, Transport):
            for event in run_events:
                self._emit(self._to, event)
        else:
            append(Path(self._to), "".join(f"{Serde.to_json(event)}\n" for event in run_events))

    def _emit(self, transport: Transport, event: RunEvent) -> None:
        """Send one event. SinkDown when the server takes no events at present: no answer, 5xx, wrong credentials, or a
        redirect. HTTPError when it refuses this event.

        A redirect, to a login page for example, is SinkDown even if it ends with 200: requests may follow it with a
        GET, and then the event was not stored.
        """
        try:
            response: object = transport.emit(event)
        except HTTPError as error:
            status = 0 if error.response is None else error.response.status_code
            if status >= 500 or status in _DOWN:
                raise SinkDown(str(error)) from error
            raise
        except RequestException as error:  # no response, or one that cannot be read
            raise SinkDown(str(error)) from error
        if not isinstance(response, Response):  # another transport
            return
        if response.request.method != "POST" or not 200 <= response.status_code < 300:
            first = next(iter(response.history), response)
            raise SinkDown(f"{first.url} did not accept the event: {first.status_code} {first.reason}")


def run_event(event: Event, namespace: str) -> RunEvent:
    """The run event. The same event always gives the same bytes."""
    return RunEvent(
        eventTime=event.at,
        producer=PRODUCER,
        eventType=_STATES.get(event.type) or RunState[event.type],
        run=Run(event.run, _facets(event)),
        job=Job(namespace, event.job),
        inputs=[InputDataset(namespace, name) for name in event.inputs],
        outputs=[OutputDataset(namespace, name) for name in event.outputs],
    )


def _facets(event: Event) -> dict[str, RunFacet]:
    common: dict[str, Any] = {"producer": PRODUCER}
    facets: dict[str, RunFacet] = {
        "holdfast_idempotency": IdempotencyRunFacet(
            event.id, event.key, event.number, event.attempt, event.checksum, event.params_hash, event.result_hash,
            **common,
        ),
        "holdfast_lock": LockRunFacet(event.fence, event.held, **common),
        "holdfast_governance": GovernanceRunFacet(event.sovereignty_event, event.actor, event.justification, **common),
    }  # fmt: skip
    if event.contract is not None:
        name, version = event.contract["name"], event.contract["version"]
        facets["holdfast_contract"] = ContractRunFacet(name, version, event.contract.get("verdict"), **common)
    if event.energy is not None:
        energy = event.energy
        facets["holdfast_energy"] = EnergyRunFacet(
            energy["energy_joules"], energy["carbon_grams"], energy["cpu_seconds"], energy["wall_seconds"],
            energy["estimate"], energy["method"], dict(energy["parameters"]), **common,
        )  # fmt: skip
    if event.topic is not None:
        payload = json.dumps(event.payload, separators=(",", ":"), sort_keys=True)
        facets["holdfast_message"] = MessageRunFacet(event.topic, payload, **common)
    if event.error is not None:
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(event.error, "PYTHON", **common)
    return facets
