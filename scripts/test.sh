#!/usr/bin/env bash
# Make a virtual environment, install what the tests need, and run ruff, mypy and the tests, two files at a time. Arguments go to
# pytest.
source "$(dirname "$0")/setup.sh" requirements-test.txt
ruff check .
ruff format --check .
mypy
exec python -m pytest -q -n 2 --dist loadfile tests "$@"
