# shellcheck shell=sh
# Sets slow to how many times slower than usual this machine starts processes: 1 to 4. A virtual
# machine without hardware support, or a busy machine, may take four times as long. To be sourced.
# SBXRUN_TESTS_MACHINE overrides the measurement.
slow_ticks() {
    read -r up _ </proc/uptime
    echo "${up%.*}${up#*.}"
}
slow=${SBXRUN_TESTS_MACHINE-}
if [ -z "$slow" ]; then
    slow=$(slow_ticks)
    for i in 0 1 2 3 4 5 6 7 8 9; do
        for i in 0 1 2 3 4 5 6 7 8 9; do /bin/true && /bin/true; done
    done
    slow=$((($(slow_ticks) - slow) / 16)) # 200 usually take 0.16 s
    [ "$slow" -ge 1 ] || slow=1
    [ "$slow" -le 4 ] || slow=4
fi
