"""Processes that use everything holdfast has, and the judge of what they recorded. ``proof.cluster`` and the lane
``services`` of ``proof.chaos`` add the faults.
"""
