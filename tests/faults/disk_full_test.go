package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// small runs a shell script in a mount namespace of its own, where dir ($disk) is a tmpfs of the given size and $top
// the test's directory on the real disk. The script finds sbxrun in PATH, and must end what it starts.
func (e *env) small(bytes int, dir, script string) *harness.Result {
	e.t.Helper()
	words := []string{"bwrap", "--dev-bind", "/", "/", "--size", fmt.Sprint(bytes), "--tmpfs", dir}
	if os.Getuid() == 0 {
		words = append(words, "--cap-add", "ALL") // root has them outside too
	}
	env := []string{"disk=" + dir, "top=" + e.top, "PATH=" + filepath.Dir(harness.Binary(e.t)) + ":" + harness.Path}
	c, err := e.command(harness.Options{Env: env}, append(words, "sh", "-ec", `sbxrun() { case $1 in start|exec|kill) verb=$1; shift; command sbxrun $verb --proof-timeout 30 "$@" ;; *) command sbxrun "$@" ;; esac; }
`+script)...)
	check.Must(e.t, err)
	return e.wait(c)
}

// When the disk is full, everything that writes prints one line with the cause, exits with the
// code of a failure, and leaves only what was there before.
func TestDiskFull(t *testing.T) {
	// Root's cleanup also reports processes and cgroups of other tests.
	for _, tt := range []struct {
		name, script string
		want         []string // patterns for the lines of stdout
	}{
		{"snapshot", `
export SBXRUN_DATA_DIR=$disk/data; mkdir $top/o
sbxrun start --name box --cwd none --overlay $top/o:/data --upper $top/upper >/dev/null
sbxrun exec box sh -ec 'head -c 20000000 /dev/urandom >/data/big'
try sbxrun snapshot create box --name s
find $disk/data/snapshots -type f | sed s,.*/,,
sbxrun snapshot ls
sbxrun exec box sh -ec 'head -c 3000000 /dev/urandom >/data/big'
sbxrun snapshot create box --name s >/dev/null 2>&1; echo $?
head -c 3000000 /dev/zero >$disk/other # 3 MB packed, and 3 MB more are needed
try sbxrun start --from s --name again
find $disk/data/snapshots/tmp $disk/data/snapshots/trees -mindepth 1
sbxrun kill --all --grace 0 >/dev/null; sbxrun cleanup >/dev/null; sbxrun cleanup | grep -v 'zombie\|init\|cgroup' || true`,
			[]string{`125 sbxrun: error: snapshots: .*no space left on device; free disk space there, or remove snapshots or images: sbxrun snapshot rm, sbxrun image rm`, "lock", "0", `125 sbxrun: error: cannot unpack snapshot s: .*no space left on device.*`}},
		{"volume", `
export SBXRUN_DATA_DIR=$disk
try sbxrun --cwd none --volume v:/v sh -c 'head -c 20000000 /dev/zero >/v/big'
try sbxrun --cwd none --volume v:/v sh -c 'wc -c </v/big >/dev/null; rm /v/big; echo text >/v/text; cat /v/text'
head -c 20000000 /dev/zero >$disk/fill || true
try sbxrun volume export v $disk/out
try sbxrun --cwd none --volume new:/v true
ls -A $disk $disk/volumes; rm $disk/fill
try sbxrun volume rm v
sbxrun cleanup | grep -v 'zombie\|init\|cgroup' || true`,
			[]string{`1 head: .*No space left on device`, `0 text`, `125 sbxrun: error: cannot write ".*/out": no space left on device`, `(0|125 sbxrun: error: .*no space left on device)`, ".*:", "fill", "volumes", "", ".*:", "(new\n)?v", "0"}},
		{"upper", `
mkdir $top/o
try sbxrun --cwd none --overlay $top/o:/data --upper $disk/upper sh -c 'head -c 20000000 /dev/zero >/data/big'
rm -rf $disk/upper
head -c 20000000 /dev/zero >$disk/fill || true
try sbxrun --cwd none --overlay $top/o:/data --upper $disk/upper sh -c 'echo text >/data/big'
ls -A $top/o; sbxrun cleanup | grep -v 'zombie\|init\|cgroup' || true`,
			[]string{`1 head: .*No space left on device`, `.* .*o space left on device.*`}},
		{"apply", `
printf old >$disk/a
sbxrun start --name box --cwd none --overlay $disk:/data --upper $top/upper >/dev/null
sbxrun exec box sh -ec 'cd /data; echo new >a; head -c 20000000 /dev/urandom >b; echo new >c'
try sbxrun apply box
cat $disk/a; ls -A $disk
sbxrun cleanup | grep -v 'zombie\|init\|cgroup' || true; sbxrun kill --grace 0 box >/dev/null; sbxrun cleanup >/dev/null`,
			[]string{"125 M a", `sbxrun: error: cannot apply "b": no space left on device`, "new", "a"}},
		{"cp", `
sbxrun start --name box --cwd none >/dev/null
sbxrun exec box sh -c 'head -c 20000000 /dev/zero >big; mkdir d; cp big d; echo x >d/small'
echo old >$disk/big
try sbxrun cp box:big $disk
cat $disk/big; ls -A $disk
try sbxrun cp -r box:d $disk
ls -A $disk $disk/d
sbxrun kill --grace 0 box >/dev/null; sbxrun cleanup >/dev/null`,
			[]string{`125 sbxrun: error: no space left for "/home/sandbox/big"`, "old", "big", `125 sbxrun: error: no space left for "/home/sandbox/d/big"`, ".*:", "big", "d", "", ".*:", "(small)?"}},
		{"get", `
try sbxrun --cwd none --get big:$disk sh -c 'head -c 20000000 /dev/zero >big'
ls -A $disk`,
			[]string{`74 sbxrun: error: --get .*: no space left for .*`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t)
			disk := filepath.Join(e.top, "disk")
			check.Must(t, os.Mkdir(disk, 0o700))
			s := e.small(8<<20, disk, `try() { code=0; "$@" >$top/said 2>&1 || code=$?; echo "$code $(cat $top/said)" | sed 's/ $//'; }
`+tt.script)
			ok, err := regexp.MatchString("^"+strings.Join(tt.want, "\n")+"\n?$", string(s.Stdout))
			check.That(t, ok && err == nil && s.ExitCode == 0, "code %d, stderr %s, stdout\n%s\nwant\n%s", s.ExitCode, string(s.Stderr), s.Stdout, strings.Join(tt.want, "\n"))
			e.cleared()
		})
	}
}

// Commands that read a layer with many entries and long paths stay within a memory limit, or
// refuse the layer in one line when its paths are too long together. SBXRUN_SOAK=100 makes 30,000
// entries; 400 makes 100,000 and copies them too.
func TestManyEntries(t *testing.T) {
	n := min(100_000, max(2000, 300*soak(t)))
	const most = 640 << 10 // KiB of memory; all paths together have at most 64 MiB
	for _, tt := range []struct {
		name    string
		levels  int // number of directories, each with a name of 240 bytes
		refused bool
	}{
		{"long", 60 << 20 / (240 * 100_000), false}, // 2: 60 MB of paths with 100,000 files
		{"longer", 10, n > 26_000},                  // 250 MB with 100,000 files, which a snapshot still accepts
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t)
			dir := filepath.Join(e.top, "original")
			check.Must(t, os.Mkdir(dir, 0o755))
			e.start([]string{"--name", "box", "--timeout", "30m", "--cwd", "none", "--overlay", dir + ":/data", "--upper", filepath.Join(e.top, "upper")})
			e.ok("exec", "box", "sh", "-ec", fmt.Sprintf(`cd /data; n=$(printf %%0240d 1); for i in $(seq %d); do mkdir $n; cd $n; done; n=$(printf %%0100d 1); seq %d | sed s/^/$n/ | xargs touch`, tt.levels, n))
			type verb struct {
				refused bool
				args    []string
			}
			verbs := []verb{
				{tt.refused, []string{"diff", "box", "--stat"}}, {tt.refused, []string{"diff", "box", "--json"}},
				{tt.refused, []string{"apply", "box"}},
				{false, []string{"snapshot", "create", "box", "--name", "s"}}, {false, e.startFlags("--from", "s", "--name", "again")},
			}
			copied, got := filepath.Join(e.top, "copied"), filepath.Join(e.top, "got")
			if soak(t) >= 400 { // as slow as the disk
				verbs = append(verbs, verb{false, []string{"cp", "-r", "box:/data", copied}}, verb{false, []string{"run", "--cwd", "none", "--from", "s", "--get", "/data:" + got, "true"}})
			}
			for _, verb := range verbs {
				c, err := e.begin(verb.args...)
				check.Must(t, err)
				<-c.Exited() // no time limit: as slow as the disk
				s := e.wait(c)
				peak := c.State().SysUsage().(*syscall.Rusage)
				t.Logf("%s: %v, peak of %d MiB", verb.args[0], s.Elapsed.Round(time.Millisecond), peak.Maxrss>>10)
				check.That(t, peak.Maxrss <= most, "%s: it took %d KiB of memory", verb.args[0], peak.Maxrss)
				check.That(t, (!verb.refused || s.ExitCode == 125 && strings.Contains(string(s.Stderr), "too long in total")) && (verb.refused || s.ExitCode == 0), "%v", s)
			}
			for _, dir := range []string{copied, filepath.Join(got, "data")} {
				files := -1 // the directory itself
				err := filepath.WalkDir(dir, func(string, os.DirEntry, error) error { files++; return nil })
				check.That(t, soak(t) < 400 || err == nil && files == n+tt.levels, "%s: %d entries, %v, want %d", dir, files, err, n+tt.levels)
			}
			e.do("kill", "--all", "--grace", "0")
			e.ok("cleanup")
			e.cleared()
		})
	}
}
