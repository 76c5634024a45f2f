"""Who may do what to which data, and the audit of what operators did."""
