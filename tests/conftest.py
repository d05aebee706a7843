from hypothesis import settings

# A first example pays for imports and a busy machine is slow: time limits belong to pytest-timeout.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
