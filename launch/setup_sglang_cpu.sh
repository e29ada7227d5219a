# Sourced after launch/setup.sh: puts the real SGLang into .venv on a machine without CUDA.
#
# On a machine with CUDA, `pip install -e '.[sglang]'` does it. Its packages are CUDA builds, so here SGLang goes in
# without its dependencies, and then those that it needs on a CPU. Nothing that is installed already changes its
# version. The two packages that have no CPU build, sgl_kernel and torchvision, are replaced by the stand-ins in
# megarl/rollout/sglang/cpu_standins, which only the engine's processes see.
#
# A second call with the same lists installs nothing and takes no time.

megarl_setup_sglang_cpu() {
    local venv="$megarl_root/.venv" list="$megarl_root/launch/sglang_cpu_requirements.txt" stamp wanted kept log
    # The versions that run together: triton and xgrammar are imported at start-up, used on a GPU alone.
    local exact="sglang==0.5.23 triton==3.7.1 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0"
    stamp="$venv/.megarl-sglang-cpu"
    wanted="$(cksum <"$list") $(cat "$venv/.megarl-installed") $exact"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    if "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
        "$venv/bin/python" -m pip show --quiet sglang 2>/dev/null && return 0
        echo "this machine's torch is a CUDA build: install SGLang with  pip install -e '.[sglang]'" >&2
        return 1
    fi
    echo "installing SGLang for a CPU into $venv (about 500 MB, a minute)" >&2
    kept=$(mktemp) log=$(mktemp)
    "$venv/bin/python" -m pip list --disable-pip-version-check --format=freeze --exclude-editable >"$kept"
    # pip's output is shown on failure alone: after a success too it lists the CUDA packages that SGLang asks for.
    # shellcheck disable=SC2086
    { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $exact &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$kept" \
            --requirement "$list"; } >"$log" 2>&1 || {
        cat "$log" >&2
        rm -f "$kept" "$log"
        echo "SGLang could not be installed (see above); nothing else was changed, so run this again" >&2
        return 1
    }
    rm -f "$kept" "$log"
    echo "$wanted" >"$stamp"
}

megarl_setup_sglang_cpu || return 1
