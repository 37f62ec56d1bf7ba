package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// snapshotted measures storing random data, and starting from it, against tar and zstd at the same
// level, which neither sync nor hash.
func snapshotted(builds []*build) {
	for _, mib := range []int{0, 100, 1000} {
		s := &snapshotBench{b: builds[0]}
		err := caught(func() { s.measure(mib) })
		s.close()
		must(err)
	}
}

// snapshotBench is a sandbox with data in its layer on disk.
type snapshotBench struct {
	b   *build
	dir string
	n   int
}

func (s *snapshotBench) command(args ...string) *exec.Cmd {
	cmd := s.b.command(args...)
	cmd.Env = append(cmd.Environ(), "SBXRUN_DATA_DIR="+filepath.Join(s.dir, "data"))
	return cmd
}

func (s *snapshotBench) do(args ...string) { done(s.command(args...)) }

func (s *snapshotBench) close() {
	_ = caught(func() { s.do("kill", "--all", "--grace", "0") }) // leftovers show a failure
	_ = os.RemoveAll(s.dir)
	reapOrphans()
}

func (s *snapshotBench) measure(mib int) {
	s.dir = got(os.MkdirTemp("/var/tmp", "sbxrun-bench-"))
	below, upper := filepath.Join(s.dir, "below"), filepath.Join(s.dir, "upper")
	must(os.Mkdir(below, 0o755))
	s.do("start", "--name", "full", "--cwd", "none", "--overlay", below+":/data", "--upper", upper)
	if mib > 0 {
		s.do("exec", "full", "dd", "if=/dev/urandom", "of=/data/file", "bs=1M", fmt.Sprintf("count=%d", mib))
	}
	// Each snapshot is removed with its layer, so that the layer is stored again.
	take := variant{"A", "sbxrun snapshot", func() time.Duration {
		took := elapsed(quiet(s.command("snapshot", "create", "full", "--name", "s")))
		s.do("snapshot", "rm", "s")
		return took
	}}
	packed := filepath.Join(s.dir, "packed.tar.zst")
	shell := func(script string) *exec.Cmd {
		return exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script)
	}
	n := rounds(7)
	tar := fmt.Sprintf("tar -C %s/0/upper -c . | zstd -q -T0 -3 -f -o %s", upper, packed)
	alone := variant{"B", "tar | zstd -T0 -3", func() time.Duration { return elapsed(shell(tar)) }}
	synced := variant{"C", "the same, and sync", func() time.Duration { return elapsed(shell(tar + "; sync " + packed)) }}
	compare("snapshot", fmt.Sprintf("%d MiB of random data in a layer on disk are kept", mib), n, 1, []variant{take, alone, synced})
	s.do("snapshot", "create", "full", "--name", "s")
	s.restore(mib, n, packed)
}

// restore measures the start from a snapshot.
func (s *snapshotBench) restore(mib, n int, packed string) {
	start := func(flags ...string) time.Duration {
		s.n++
		name := fmt.Sprintf("again%d", s.n)
		took := elapsed(quiet(s.command(append([]string{"start", "--name", name, "--cwd", "none"}, flags...)...)))
		s.do("kill", "--grace", "0", name)
		return took
	}
	to := filepath.Join(s.dir, "unpacked")
	compare("snapshot", fmt.Sprintf("%d MiB of random data are restored", mib), n, 1, []variant{
		{"A", "start --from, not unpacked yet", func() time.Duration {
			s.do("cleanup")
			return start("--from", "s")
		}},
		{"B", "start --from", func() time.Duration { return start("--from", "s") }},
		{"C", "zstd -d | tar", func() time.Duration {
			must(os.RemoveAll(to))
			script := strings.Join([]string{"mkdir " + to, "zstd -q -dc " + packed + " | tar -x -C " + to}, "; ")
			return elapsed(exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script))
		}},
		{"D", "start, without a snapshot", func() time.Duration { return start() }},
	})
}

// quiet drops a command's output; elapsed reports its failure.
func quiet(cmd *exec.Cmd) *exec.Cmd {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err == nil {
		cmd.Stderr = null // closed with the process
	}
	return cmd
}
