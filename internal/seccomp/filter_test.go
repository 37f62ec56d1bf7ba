package seccomp

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// judge has the filter judge a call, as the kernel would.
func judge(t *testing.T, f Filter, audit, number, arg uint32) uint32 {
	t.Helper()
	program, err := f.Program()
	if err != nil {
		t.Fatal(err)
	}
	var list []bpf.Instruction
	for ; len(program) > 0; program = program[8:] {
		list = append(list, bpf.RawInstruction{Op: binary.NativeEndian.Uint16(program), Jt: program[2], Jf: program[3], K: binary.NativeEndian.Uint32(program[4:])}.Disassemble())
	}
	vm, err := bpf.NewVM(list)
	if err != nil {
		t.Fatal(err)
	}
	// The machine of x/net reads numbers as they come from a network.
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[numberAt:], number)
	binary.BigEndian.PutUint32(data[archAt:], audit)
	binary.BigEndian.PutUint32(data[firstArgAt:], arg)
	n, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(n)
}

func TestJudge(t *testing.T) {
	all := []struct {
		column       int
		audit, clone uint32
		goarch       string
	}{
		{x86_64, unix.AUDIT_ARCH_X86_64, 56, "amd64"}, {i386, unix.AUDIT_ARCH_I386, 120, "amd64"},
		{arm64, unix.AUDIT_ARCH_AARCH64, 220, "arm64"}, {arm, unix.AUDIT_ARCH_ARM, 120, "arm64"},
	}
	for _, a := range all {
		if a.goarch != runtime.GOARCH {
			if got := judge(t, Filter{}, a.audit, 0, 0); got != missing {
				t.Errorf("a call of another machine: %#x", got)
			}
			continue
		}
		for _, f := range []Filter{{}, {Namespaces: true}} {
			seen := map[uint32]bool{}
			for _, r := range table {
				number := r.number[a.column]
				if number == none {
					continue
				}
				seen[number] = true
				want := r.answer
				if r.spaces && !f.Namespaces {
					want = unix.SECCOMP_RET_ALLOW
				}
				if got := judge(t, f, a.audit, number, 0); got != want {
					t.Errorf("%+v, %s of %#x: %#x, want %#x", f, r.name, a.audit, got, want)
				}
			}
			for number := range uint32(600) {
				if got := judge(t, f, a.audit, number, 0); !seen[number] && got != unix.SECCOMP_RET_ALLOW {
					t.Errorf("%+v, %d of %#x: %#x", f, number, a.audit, got)
				}
			}
			want := uint32(unix.SECCOMP_RET_ALLOW)
			if f.Namespaces {
				want = refused
			}
			if got := judge(t, f, a.audit, a.clone, unix.CLONE_NEWUSER|unix.CLONE_NEWNS); got != want {
				t.Errorf("%+v, clone of a user namespace: %#x", f, got)
			}
			if got := judge(t, f, a.audit, a.clone, unix.CLONE_VM|unix.CLONE_THREAD); got != unix.SECCOMP_RET_ALLOW {
				t.Errorf("%+v, clone of a thread: %#x", f, got)
			}
		}
	}
	if runtime.GOARCH == "amd64" {
		if got := judge(t, Filter{}, unix.AUDIT_ARCH_X86_64, x32|1, 0); got != missing {
			t.Errorf("x32: %#x", got)
		}
	}
}

// TestNumbers compares the table with that of package unix, for every architecture.
func TestNumbers(t *testing.T) {
	dir := moduleDir(t)
	for column, goarch := range map[int]string{x86_64: "amd64", i386: "386", arm64: "arm64", arm: "arm"} {
		data, err := os.ReadFile(filepath.Join(dir, "zsysnum_linux_"+goarch+".go"))
		if errors.Is(err, fs.ErrPermission) {
			// Somebody else has compiled this, and has made the comparison.
			t.Logf("%v", err)
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		numbers := map[string]string{}
		for _, m := range regexp.MustCompile(`(?m)^\s*SYS_(\w+)\s*=\s*(\d+)`).FindAllStringSubmatch(string(data), -1) {
			numbers[strings.ToLower(m[1])] = m[2]
		}
		for _, r := range append(table[:], row{name: "clone", number: [columns]uint32{56, 120, 220, 120}}) {
			got := uint32(0)
			for _, c := range numbers[r.name] {
				got = got*10 + uint32(c-'0')
			}
			if got != r.number[column] {
				t.Errorf("%s of %s is %d, not %d", r.name, goarch, got, r.number[column])
			}
		}
	}
}

// moduleDir is where the source of package unix is, as the compiler has seen it.
func moduleDir(t *testing.T) string {
	t.Helper()
	file, _ := runtime.FuncForPC(funcPC()).FileLine(funcPC())
	return filepath.Dir(file)
}

func funcPC() uintptr {
	f := unix.Getpgrp
	return **(**uintptr)(unsafe.Pointer(&f))
}

// TestKernel has the kernel take the filter, for one thread, and refuse by it.
func TestKernel(t *testing.T) {
	if !Known() {
		t.Fatalf("no filter for %s", runtime.GOARCH)
	}
	program, err := (&Filter{Namespaces: true}).Program()
	if err != nil {
		t.Fatal(err)
	}
	errs := make(chan error)
	go func() {
		defer close(errs)
		runtime.LockOSThread() // and never unlocked: the thread ends with its filter
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			errs <- err
			return
		}
		fprog := unix.SockFprog{Len: uint16(len(program) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
		if _, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&fprog))); errno != 0 {
			errs <- errno
			return
		}
		_, _, keys := unix.RawSyscall(unix.SYS_KEYCTL, 0, 0, 0)
		_, _, spaces := unix.RawSyscall(unix.SYS_UNSHARE, unix.CLONE_NEWUSER, 0, 0)
		_, _, ring := unix.RawSyscall(unix.SYS_IO_URING_SETUP, 1, 0, 0)
		if keys != unix.EPERM || spaces != unix.EPERM || ring != unix.ENOSYS || unix.Getpid() != os.Getpid() {
			t.Errorf("keyctl %v, unshare %v, io_uring_setup %v", keys, spaces, ring)
		}
	}()
	for err := range errs {
		t.Error(err)
	}
}

func BenchmarkProgram(b *testing.B) {
	for range b.N {
		if _, err := (&Filter{Namespaces: true}).Program(); err != nil {
			b.Fatal(err)
		}
	}
}
