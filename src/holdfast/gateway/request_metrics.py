"""The histogram of requests. Labels are the templates of routes, never paths, which clients could make up."""

from __future__ import annotations

from http import HTTPMethod

from prometheus_client import CollectorRegistry, Histogram

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RequestMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Histogram(
            "holdfast_http_request_seconds", "Requests by route and status, and how long they took.",
            ("method", "route", "status"), buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip

    def observe(self, method: str, route: str | None, status: int, seconds: float) -> None:
        method = method if method in (*HTTPMethod, "WEBSOCKET") else "other"
        self._requests.labels(method, route or "none", str(status)).observe(seconds)
