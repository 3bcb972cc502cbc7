"""What hdet is measured with, from the root of the repository: ``python -m benchmarks.<name>``.

docs/evidence/index.md has a table of them: question, command, minutes, page. No part of the wheel.
"""
