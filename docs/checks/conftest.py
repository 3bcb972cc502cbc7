"""What every test gets, as in tests/."""

from tests.conftest import one_thread  # noqa: F401
