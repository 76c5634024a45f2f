"""What is measured: the table of all metrics, the events they follow, and gauges to be read; and the log.

``holdfast.integrations.opentelemetry`` and ``holdfast.integrations.prometheus`` export them. For anything else:

    stop = holdfast.telemetry.listen(lambda event, fields: print(event, fields))
    holdfast.telemetry.readings()

``logger(name).event("noun.what", WARNING, "sentence with %(field)s", field=…)`` is how all parts of holdfast log.
"""

from __future__ import annotations

import os

from holdfast.runtime.log import ERROR, INFO, WARNING, logger
from holdfast.runtime.metrics import BUCKETS, BY_EVENT, GAUGES, METRICS, OPERATION, Bound, Metric, exported_names
from holdfast.runtime.telemetry import Listener, labelled_readings, listen, readings

__all__ = [
    "BUCKETS", "BY_EVENT", "ERROR", "GAUGES", "INFO", "METRICS", "OPERATION", "WARNING", "Bound", "Listener", "Metric",
    "environment", "exported_names", "labelled_readings", "listen", "logger", "readings",
]  # fmt: skip


def environment(env: str | None) -> str:
    """What the label ``env`` says: what was given, else $HOLDFAST_ENV, else nothing."""
    return os.environ.get("HOLDFAST_ENV", "") if env is None else env
