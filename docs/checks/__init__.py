"""The documents say what is so; `make test-all` runs these after tests/."""
