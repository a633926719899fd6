#!/usr/bin/env bash
# Make a virtual environment, install what is needed to run, and show judge decoding on the shipped demo pair.
source "$(dirname "$0")/setup.sh" requirements.txt
python generate.py --show "$@"
python scripts/demo.py
