"""``python -m hdet``: the command line."""

from hdet.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
