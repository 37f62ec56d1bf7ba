package limits

import (
	"bytes"
	"math"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Environment returns variables that limit the threads of numeric libraries to the CPU limit, rounded up.
// The libraries use the machine's number of CPUs, some without checking their affinity. The value is at
// most the number of CPUs that the caller may use.
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

// CPUSet returns the caller's CPUs to keep so that nproc(1) shows the limit, rounded up, or nil if they are
// unknown. seed, such as a PID, spreads sandboxes over the CPUs.
func CPUSet(cpus float64, seed int) (keep []int) {
	if !(cpus > 0) {
		return nil
	}
	return choose(ownCPUs(), cpus, seed)
}

// ownCPUs returns the CPUs that the caller may use, or nil if they are unknown.
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

// FakeMeminfo returns the text of /proc/meminfo for a machine with this much memory and swap. Unknown
// lines stay.
func FakeMeminfo(real []byte, memory, swap int64) []byte {
	bounds := map[string]int64{
		"MemTotal": memory, "MemFree": memory, "MemAvailable": memory, "SwapTotal": swap, "SwapFree": swap,
		// Values of the whole machine, which would exceed the total.
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
