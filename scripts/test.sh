#!/usr/bin/env bash
# Make a virtual environment, install what the tests need, and run them, two files at a time. Arguments go to pytest.
source "$(dirname "$0")/setup.sh" requirements-test.txt
exec python -m pytest -q -n 2 --dist loadfile tests "$@"
