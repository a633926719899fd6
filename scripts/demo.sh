#!/usr/bin/env bash
# Make a virtual environment, install what is needed to run, and show judge decoding on the shipped demo pair. Arguments go to
# demo.py.
source "$(dirname "$0")/setup.sh" requirements.txt
python scripts/demo.py "$@"
echo "
next: source $venv/bin/activate, then python generate.py --show, or --help"
