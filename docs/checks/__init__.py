"""The documents and the examples say what is so; `make test-all` runs these after tests/."""
