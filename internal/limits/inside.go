package limits

import (
	"bytes"
	"math"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Environment pins the threads of numeric libraries to the CPU limit, rounded up.
// They size themselves by the machine's CPUs, some before they look at their affinity. They are
// told of no more CPUs than the caller may use.
func Environment(cpus float64) (env []string) {
	if !(cpus > 0) {
		return nil
	}
	most := float64(maxCPUs)
	if own := ownCPUs(); len(own) > 0 {
		most = float64(len(own))
	}
	n := "=" + strconv.FormatInt(int64(math.Ceil(min(cpus, most))), 10)
	for _, name := range []string{"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
		"NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS", "GOMAXPROCS"} {
		env = append(env, name+n)
	}
	return env
}

// CPUSet says which of the caller's CPUs to keep so that nproc(1) shows the limit,
// rounded up. seed, a pid say, spreads sandboxes over the CPUs. nil if it is not known.
func CPUSet(cpus float64, seed int) (keep []int) {
	if !(cpus > 0) {
		return nil
	}
	return choose(ownCPUs(), cpus, seed)
}

// ownCPUs are those that the caller may use; nil if it is not known.
func ownCPUs() (own []int) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil // more CPUs than a CPUSet has
	}
	for cpu := range len(set) * strconv.IntSize {
		if set.IsSet(cpu) {
			own = append(own, cpu)
		}
	}
	return own
}

func choose(own []int, cpus float64, seed int) (keep []int) {
	if len(own) == 0 || !(cpus > 0) {
		return nil
	}
	for i := range int(math.Ceil(min(cpus, float64(len(own))))) {
		keep = append(keep, own[(max(seed, 0)%len(own)+i)%len(own)])
	}
	return keep
}

// FakeMeminfo is the text of /proc/meminfo as a machine with this much memory
// and swap would show it. What it does not know stays.
func FakeMeminfo(real []byte, memory, swap int64) []byte {
	bounds := map[string]int64{
		"MemTotal": memory, "MemFree": memory, "MemAvailable": memory, "SwapTotal": swap, "SwapFree": swap,
		// Of the whole machine's: they would be more than the total.
		"Buffers": 0, "Cached": 0, "SwapCached": 0, "SReclaimable": 0,
	}
	var out bytes.Buffer
	for line := range bytes.Lines(real) {
		key, value, _ := strings.Cut(string(line), ":")
		f := strings.Fields(value)
		bound, known := bounds[key]
		if !known || len(f) != 2 || f[1] != "kB" {
			out.Write(line)
			continue
		}
		n, err := strconv.ParseInt(f[0], 10, 64)
		if bound = max(bound, 0) / 1024; err != nil || n > bound {
			n = bound
		}
		number := strconv.FormatInt(max(n, 0), 10)
		out.WriteString(key + ":" + strings.Repeat(" ", max(1, 23-len(key)-len(number))) + number + " kB\n")
	}
	return out.Bytes()
}
