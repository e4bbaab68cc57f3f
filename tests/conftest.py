"""Settings of all tests."""

from hypothesis import settings

# A busy machine must not fail a property; examples are drawn the same way on every run.
settings.register_profile("undertow", deadline=None, derandomize=True)
settings.load_profile("undertow")
