"""Makes this folder importable, so that a test file can write `from ranks import run_ranks`."""
