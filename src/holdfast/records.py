"""The records that the collections of a client return, for annotations and for services that answer with them.

The four that most programs name are in ``holdfast`` itself: LeaseRecord, LockRecord, ObjectRecord, OperationRecord.
"""

from __future__ import annotations

from holdfast.governance.audit_record import AuditRecord
from holdfast.lease.records import HistoryRecord
from holdfast.lineage.records import ParkedRecord, RelayRecord
from holdfast.operations.log import LogEntry
from holdfast.operations.review_record import ReviewRecord

__all__ = ["AuditRecord", "HistoryRecord", "LogEntry", "ParkedRecord", "RelayRecord", "ReviewRecord"]
