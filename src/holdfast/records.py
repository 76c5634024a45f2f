"""The records that a client returns, for annotations and for services that answer with them.

The four that most programs name are in ``holdfast`` itself: LeaseRecord, LockRecord, ObjectRecord, OperationRecord.
"""

from __future__ import annotations

from holdfast.doctor.findings import Examination, Finding
from holdfast.governance.audit_record import AuditRecord
from holdfast.lease.records import HistoryRecord
from holdfast.lineage.records import ParkedRecord, RelayRecord
from holdfast.objects.changes import Change
from holdfast.operations.log import LogEntry, LogPage, Verification
from holdfast.operations.outcome import RecoveryRecord
from holdfast.operations.review_record import ReviewRecord
from holdfast.recipes.elector_terms import ElectorStatus
from holdfast.schedules.records import ScheduleRecord, ScheduleRun

__all__ = [
    "AuditRecord",
    "Change",
    "ElectorStatus",
    "Examination",
    "Finding",
    "HistoryRecord",
    "LogEntry",
    "LogPage",
    "ParkedRecord",
    "RecoveryRecord",
    "RelayRecord",
    "ReviewRecord",
    "ScheduleRecord",
    "ScheduleRun",
    "Verification",
]
