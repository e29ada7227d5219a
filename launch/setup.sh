# Sourced, not run: makes or reuses .venv with what megarl needs, and activates it. Used by tests/run.sh and launch/*.sh.
#
#   MEGARL_EXTRAS   extras of pyproject.toml to install (default: dev). The extra `tasks` is installed too, if possible:
#                   one of its packages needs a C compiler, and where there is none a warning says so.
#   MEGARL_PYTHON   the Python to make the environment with (default: the first of python3.11, python3.12, python3)
#   MEGARL_TORCH    the torch to install before anything asks for it (default: torch==2.13.0, the tested build)
#
# A second call with the same pyproject.toml and extras installs nothing and takes well under a second.

megarl_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

megarl_find_python() {
    local candidate
    for candidate in ${MEGARL_PYTHON:-python3.11 python3.12 python3 python}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "megarl needs Python 3.11 or 3.12, found neither; install one, or name it: MEGARL_PYTHON=/path/to/python" >&2
    return 1
}

megarl_setup() {
    local venv="$megarl_root/.venv" extras="${MEGARL_EXTRAS:-dev}" stamp python
    stamp="$venv/.megarl-installed"
    local wanted
    wanted="$(cksum <"$megarl_root/pyproject.toml") ${MEGARL_TORCH:-torch==2.13.0} [$extras]"
    if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    if [ ! -x "$venv/bin/python" ]; then
        python=$(megarl_find_python) || return 1
        echo "making $venv with $("$python" --version 2>&1)" >&2
        "$python" -m venv "$venv" || {
            echo "could not make $venv; on Debian and Ubuntu the package python3-venv provides what is missing" >&2
            return 1
        }
    fi
    echo "installing megarl[$extras] into $venv (about 2 GB, some minutes)" >&2
    # torch first and by exact version: any looser request may take another build, several GB larger.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${MEGARL_TORCH:-torch==2.13.0}" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable \
            "$megarl_root[$extras]" || {
        echo "installation failed (see above); nothing else was changed, so run this again" >&2
        return 1
    }
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$megarl_root[tasks]" ||
        echo "warning: the extra 'tasks' could not be installed (see above); what needs it will say so" >&2
    echo "$wanted" >"$stamp"
}

megarl_setup || return 1
# shellcheck disable=SC1091
. "$megarl_root/.venv/bin/activate"
