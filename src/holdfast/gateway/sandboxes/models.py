"""What is asked for and answered about sandboxes, as OpenAPI tells it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from holdfast.gateway.sandboxes.records import GATEWAY, TOKEN

Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["sb-1"])]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$", examples=["web"])]
LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,98}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64, examples=[{"team": "a"}])]
Metadata = Annotated[dict[str, Any], Field(max_length=1000, examples=[{"ticket": 7}])]
Variable = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, Field(max_length=131_071, pattern=r"^[^\x00]*$")]
Limit = Annotated[int, Field(ge=1, lt=2**62)]


def _free(env: dict[str, str]) -> dict[str, str]:
    if taken := sorted(each for each in env if each in (GATEWAY, TOKEN) or each.startswith("HOLDFAST_SANDBOX")):
        raise ValueError(f"{taken[0]} is given to every sandbox that needs it, and cannot be set")
    return env


def _first(argv: list[str]) -> list[str]:
    if not argv[0]:
        raise ValueError("the first must not be empty: it is the program")
    return argv


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Limits(Strict):
    memory_bytes: Limit | None = None
    cpu_seconds: Limit | None = None
    open_files: Limit | None = None
    processes: Limit | None = None


class NewSandbox(Strict):
    """A program to be run; what is not given has its default."""

    id: Id | None = None
    name: Name | None = Field(None, description="Unique among sandboxes.")
    argv: Annotated[list[Text], Field(min_length=1, max_length=1024), AfterValidator(_first)]
    env: Annotated[dict[Variable, Text], Field(max_length=1000), AfterValidator(_free)] = {}
    cwd: Annotated[str, Field(max_length=4000, pattern=r"^/[^\x00]*$")] | None = Field(
        None, description="Where it runs; else in a folder of its own, which goes with it."
    )
    limits: Limits = Limits()
    grace: Annotated[float, Field(ge=0, le=3600)] = Field(10.0, description="Seconds from TERM to KILL, at its end.")
    log_bytes: Annotated[int, Field(ge=4096, le=2**30)] | None = None
    supervised: bool = Field(False, description="Ready only while its supervisor is connected.")
    labels: Labels = {}
    metadata: Metadata = {}
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "web", "argv": ["sleep", "60"], "labels": {"team": "a"}}]}
    )


class SandboxChange(Strict):
    """What is given replaces what was there; the name null takes the name away."""

    name: Name | None = None
    labels: Labels | None = None
    metadata: Metadata | None = None
    model_config = ConfigDict(json_schema_extra={"examples": [{"labels": {"team": "b"}}]})

    @model_validator(mode="before")
    @classmethod
    def _only_these(cls, given: Any) -> Any:
        fixed = sorted({*given} & {*NewSandbox.model_fields} - {*cls.model_fields}) if isinstance(given, dict) else []
        if fixed:
            raise ValueError(f"{fixed[0]} of what runs cannot be changed: delete it, and create another one")
        return given


class Spec(BaseModel):
    argv: list[str]
    env: list[str] = Field(description="The names of its variables; their values are not told.")
    cwd: str | None
    limits: dict[str, int]
    grace: float
    log_bytes: int | None
    supervised: bool


class Sandbox(BaseModel):
    id: str
    name: str | None
    labels: dict[str, str]
    metadata: dict[str, Any]
    spec: Spec
    phase: str = Field(examples=["Provisioning", "Ready", "Error", "Deleting", "Deleted"])
    status: dict[str, Any] = Field(
        description="What the driver says: its conditions, and in details its pid, and at its end exit_code or signal.",
        examples=[{"phase": "Error", "conditions": [], "details": {"pid": 4711, "exit_code": 3}}],
    )
    version: int = Field(description="Also the ETag: to be given in If-Match.")
    created_at: datetime
    updated_at: datetime


class Sandboxes(BaseModel):
    items: list[Sandbox]
    next: str | None = Field(description="To be given as after, for the next page; null at the end.")


class Message(Strict):
    message: Any = Field(examples=[{"do": "status"}])
    timeout: Annotated[float, Field(gt=0, le=60)] = Field(10.0, description="Seconds to wait for the reply.")


class Reply(BaseModel):
    reply: Any


class Supervisor(BaseModel):
    address: str = Field(description="Of the replica that has its connection.", examples=["http://10.0.0.7:7411"])
    replica: str
    fence: int
    since: datetime
