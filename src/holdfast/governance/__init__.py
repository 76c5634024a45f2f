"""The policy of datasets, and the audit of what operators did."""
