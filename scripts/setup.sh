# Sourced by demo.sh and test.sh: a virtual environment in .venv (or $VENV) that holds the requirements file named in $1.
# The environment is made once; pip runs again only when the requirements have changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: this needs Python 3.11 or newer; $python is $("$python" --version 2>&1 || echo not there). Set PYTHON." >&2
    exit 2
fi
stamp=$(cat requirements*.txt "$1" | cksum | tr ' ' -)
if [[ ! -f $venv/stamp-$1 || $(cat "$venv/stamp-$1") != "$stamp" ]]; then
    echo "installing $1 into $venv: PyTorch and more, a minute or several" >&2
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$1"
    echo "$stamp" >"$venv/stamp-$1"
fi
export PATH="$(cd "$venv/bin" && pwd):$PATH"
