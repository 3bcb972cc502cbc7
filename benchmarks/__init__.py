"""What hdet is measured with, from the root of the repository: ``python -m benchmarks.<name>``.
No part of the wheel."""
