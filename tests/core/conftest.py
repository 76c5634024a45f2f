"""The same examples in every run: a failure here is never a matter of luck."""

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")
