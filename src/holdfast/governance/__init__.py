"""The policy of datasets, and the audit of what operators did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy_names import lazy_names

if TYPE_CHECKING:
    from holdfast.governance.dataset import Dataset
    from holdfast.governance.policy import Allow, Deny, Policy, PolicyContext, Review
    from holdfast.governance.policy_record import PolicyRecord

__all__ = ["Allow", "Dataset", "Deny", "Policy", "PolicyContext", "PolicyRecord", "Review"]

if not TYPE_CHECKING:
    _POLICY = ("Allow", "Deny", "Policy", "PolicyContext", "Review")
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Dataset": f"{__name__}.dataset",
            "PolicyRecord": f"{__name__}.policy_record",
            **dict.fromkeys(_POLICY, f"{__name__}.policy"),
        },
    )
