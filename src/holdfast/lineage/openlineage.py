"""Events as OpenLineage run events: in a file, on the console, by HTTP, or through any transport of the client's.

A run is an attempt, so its id is the same whenever it is told. What OpenLineage has no word for stands in facets of our
own, whose schemas are beside this module. The client's own retries are off: that is for the relay to do, which knows
what has been told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from holdfast import Event, SinkDown
from holdfast.extras import missing_extra
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

    from holdfast.lineage.in_time import InTime
except ModuleNotFoundError as error:
    raise missing_extra(error, "openlineage") from None

PRODUCER = f"urn:holdfast:{version('holdfast')}"
SCHEMA = "urn:holdfast:openlineage:1-0-0"
SCHEMA_FILE = Path(__file__).parent / "schemas" / "openlineage.json"
_STATES = {"MESSAGE": RunState.OTHER, "UNDONE": RunState.OTHER}
_DOWN = (401, 403, 404, 408, 425, 429)
"""What a server says of itself or of us, not of what it was sent."""


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
    """As JSON: OpenLineage would leave out what is null in it."""

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/MessageRunFacet"


class OpenLineage:
    """``to``: a file, ``-`` for the console, an ``http://`` or ``https://`` URL, or a transport of the client's.
    ``namespace`` is that of jobs and datasets. By URL a server has ``timeout`` seconds for the whole of an answer."""

    def __init__(self, to: str | Path | Transport, *, namespace: str = "holdfast", timeout: float = 5.0) -> None:
        self._namespace, self._to = namespace, to
        if isinstance(to, str) and to.startswith(("http://", "https://")):
            session, adapter = Session(), InTime(max_retries=Retry(0))
            for scheme in ("http://", "https://"):  # wherever it sends us
                session.mount(scheme, adapter)
            if any(auth := get_auth_from_url(to)):
                session.auth = auth  # apart: errors repeat the address, and are logged and kept
            config = HttpConfig(urldefragauth(to), timeout=timeout, session=session, adapter=adapter)
            self._to = HttpTransport(config)

    def publish(self, events: Sequence[Event]) -> None:
        made = [run_event(event, self._namespace) for event in events]
        if isinstance(self._to, Transport):
            for each in made:
                self._emit(self._to, each)
            return
        append(Path(self._to), "".join(f"{Serde.to_json(each)}\n" for each in made))

    def _emit(self, transport: Transport, event: RunEvent) -> None:
        """By HTTP, a server has it when it says so of what was posted: one that sends us elsewhere (a page to log in,
        another scheme) may have us ask for that page, which is there, and the event would be lost."""
        try:
            said: object = transport.emit(event)
        except HTTPError as error:
            status = 0 if error.response is None else error.response.status_code
            if status >= 500 or status in _DOWN:
                raise SinkDown(str(error)) from error
            raise
        except RequestException as error:  # of no answer, or one that cannot be read
            raise SinkDown(str(error)) from error
        if isinstance(said, Response) and (said.request.method != "POST" or not 200 <= said.status_code < 300):
            first = next(iter(said.history), said)
            raise SinkDown(f"{first.url} has not taken it, but answered {first.status_code} {first.reason}")


def run_event(event: Event, namespace: str) -> RunEvent:
    """The same event gives the same document, to the last byte."""
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
    who: dict[str, Any] = {"producer": PRODUCER}
    found: dict[str, RunFacet] = {
        "holdfast_idempotency": IdempotencyRunFacet(
            event.id, event.key, event.number, event.attempt, event.checksum, event.params_hash, event.result_hash,
            **who,
        ),
        "holdfast_lock": LockRunFacet(event.fence, event.held, **who),
        "holdfast_governance": GovernanceRunFacet(event.sovereignty_event, event.actor, event.justification, **who),
    }  # fmt: skip
    if event.contract is not None:
        agreed = event.contract
        found["holdfast_contract"] = ContractRunFacet(agreed["name"], agreed["version"], agreed.get("verdict"), **who)
    if event.energy is not None:
        cost = event.energy
        found["holdfast_energy"] = EnergyRunFacet(
            cost["energy_joules"], cost["carbon_grams"], cost["cpu_seconds"], cost["wall_seconds"], cost["estimate"],
            cost["method"], dict(cost["parameters"]), **who,
        )  # fmt: skip
    if event.topic is not None:
        payload = json.dumps(event.payload, separators=(",", ":"), sort_keys=True)
        found["holdfast_message"] = MessageRunFacet(event.topic, payload, **who)
    if event.error is not None:
        found["errorMessage"] = error_message_run.ErrorMessageRunFacet(event.error, "PYTHON", **who)
    return found
