"""Bodies and answers of the routes of sandboxes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from holdfast.gateway.sandboxes.records import ADDRESS_VARIABLE, TOKEN_VARIABLE

Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["sb-1"])]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$", examples=["web"])]
LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,98}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64, examples=[{"team": "a"}])]
Metadata = Annotated[dict[str, Any], Field(max_length=1000, examples=[{"ticket": 7}])]
Variable = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, Field(max_length=131_071, pattern=r"^[^\x00]*$")]
Limit = Annotated[int, Field(ge=1, lt=2**62)]


def _check_env(env: dict[str, str]) -> dict[str, str]:
    own = (ADDRESS_VARIABLE, TOKEN_VARIABLE)
    if reserved := sorted(name for name in env if name in own or name.startswith("HOLDFAST_SANDBOX")):
        raise ValueError(f"{reserved[0]} is set by the gateway, and cannot be given")
    return env


def _check_argv(argv: list[str]) -> list[str]:
    if not argv[0]:
        raise ValueError("the first argument must not be empty: it is the program to run")
    return argv


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Limits(StrictModel):
    memory_bytes: Limit | None = None
    cpu_seconds: Limit | None = None
    open_files: Limit | None = None
    processes: Limit | None = None


class NewSandbox(StrictModel):
    """A program to run."""

    id: Id | None = None
    name: Name | None = Field(None, description="Unique among sandboxes.")
    argv: Annotated[list[Text], Field(min_length=1, max_length=1024), AfterValidator(_check_argv)]
    env: Annotated[dict[Variable, Text], Field(max_length=1000), AfterValidator(_check_env)] = {}
    cwd: Annotated[str, Field(max_length=4000, pattern=r"^/[^\x00]*$")] | None = Field(
        None, description="The working directory; by default a folder of its own, deleted with it."
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


class SandboxChange(StrictModel):
    """Members that are given replace the current ones; a null name removes the name."""

    name: Name | None = None
    labels: Labels | None = None
    metadata: Metadata | None = None
    model_config = ConfigDict(json_schema_extra={"examples": [{"labels": {"team": "b"}}]})

    @model_validator(mode="before")
    @classmethod
    def _refuse_spec(cls, body: Any) -> Any:
        fixed = sorted({*body} & {*NewSandbox.model_fields} - {*cls.model_fields}) if isinstance(body, dict) else []
        if fixed:
            raise ValueError(f"{fixed[0]} of a sandbox cannot be changed: delete it, and create another one")
        return body


class SandboxSpec(BaseModel):
    argv: list[str]
    env: list[str] = Field(description="The names of its variables, without their values.")
    cwd: str | None
    limits: dict[str, int]
    grace: float
    log_bytes: int | None
    supervised: bool


class SandboxAnswer(BaseModel):
    id: str
    name: str | None
    labels: dict[str, str]
    metadata: dict[str, Any]
    spec: SandboxSpec
    phase: str = Field(examples=["Provisioning", "Ready", "Completed", "Error", "Deleting", "Deleted"])
    status: dict[str, Any] = Field(
        description="From the driver: conditions, and in details the pid, and at the end exit_code or signal.",
        examples=[{"phase": "Error", "conditions": [], "details": {"pid": 4711, "exit_code": 3}}],
    )
    version: int = Field(description="Also the ETag, for If-Match.")
    created_at: datetime
    updated_at: datetime


class SandboxPage(BaseModel):
    items: list[SandboxAnswer]
    next: str | None = Field(description="`after` of the next page; null at the end.")


class SupervisorMessage(StrictModel):
    message: Any = Field(examples=[{"do": "status"}])
    timeout: Annotated[float, Field(gt=0, le=60)] = Field(
        10.0, description="Seconds to wait for the reply, or for the first part of a stream."
    )


class SupervisorReply(BaseModel):
    reply: Any


class SupervisorLocation(BaseModel):
    address: str = Field(description="Of the replica that has the connection.", examples=["http://10.0.0.7:7411"])
    replica: str
    fence: int
    since: datetime
