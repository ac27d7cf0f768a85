"""The stage: everything with time. Who holds what, and when; the embedded API is ``engine.open_engine``."""
