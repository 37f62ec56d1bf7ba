package seccomp

import "golang.org/x/sys/unix"

const (
	refused = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	missing = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
)

// Columns of the table.
const (
	x86_64 = iota
	i386
	arm64
	arm
	columns
)

// none: the architecture has no such call.
const none = 0

type row struct {
	name   string
	answer uint32
	spaces bool
	number [columns]uint32
}

// table is what is refused, with the numbers of each architecture.
var table = [...]row{
	// The kernel's keyrings: the caller's session keyring is the payload's as well
	// (keyrings(7)).
	{"add_key", refused, false, [columns]uint32{248, 286, 217, 309}},
	{"request_key", refused, false, [columns]uint32{249, 287, 218, 310}},
	{"keyctl", refused, false, [columns]uint32{250, 288, 219, 311}},
	// Large, and for who watches or changes the machine.
	{"bpf", refused, false, [columns]uint32{321, 357, 280, 386}},
	{"perf_event_open", refused, false, [columns]uint32{298, 336, 241, 364}},
	{"fanotify_init", refused, false, [columns]uint32{300, 338, 262, 367}},
	{"lookup_dcookie", refused, false, [columns]uint32{212, 253, 18, 249}},
	{"open_by_handle_at", refused, false, [columns]uint32{304, 342, 265, 371}},
	{"syslog", refused, false, [columns]uint32{103, 103, 116, 103}},
	{"acct", refused, false, [columns]uint32{163, 51, 89, 51}},
	{"quotactl", refused, false, [columns]uint32{179, 131, 60, 131}},
	{"quotactl_fd", refused, false, [columns]uint32{443, 443, 443, 443}},
	{"swapon", refused, false, [columns]uint32{167, 87, 224, 87}},
	{"swapoff", refused, false, [columns]uint32{168, 115, 225, 115}},
	{"reboot", refused, false, [columns]uint32{169, 88, 142, 88}},
	{"kexec_load", refused, false, [columns]uint32{246, 283, 104, 347}},
	{"kexec_file_load", refused, false, [columns]uint32{320, none, 294, 401}},
	{"init_module", refused, false, [columns]uint32{175, 128, 105, 128}},
	{"finit_module", refused, false, [columns]uint32{313, 350, 273, 379}},
	{"delete_module", refused, false, [columns]uint32{176, 129, 106, 129}},
	{"nfsservctl", refused, false, [columns]uint32{180, 169, 42, 169}},
	{"vhangup", refused, false, [columns]uint32{153, 111, 58, 111}},
	{"iopl", refused, false, [columns]uint32{172, 110, none, none}},
	{"ioperm", refused, false, [columns]uint32{173, 101, none, none}},
	// What programs can do without, and do on older kernels: userfaultfd holds kernel
	// code up at a chosen place, io_uring goes around everything that looks at calls.
	{"userfaultfd", missing, false, [columns]uint32{323, 374, 282, 388}},
	{"io_uring_setup", missing, false, [columns]uint32{425, 425, 425, 425}},
	{"io_uring_enter", missing, false, [columns]uint32{426, 426, 426, 426}},
	{"io_uring_register", missing, false, [columns]uint32{427, 427, 427, 427}},
	// Namespaces. The arguments of clone are looked at in block.
	{"unshare", refused, true, [columns]uint32{272, 310, 97, 337}},
	{"setns", refused, true, [columns]uint32{308, 346, 268, 375}},
	{"clone3", missing, true, [columns]uint32{435, 435, 435, 435}},
}

// of is one column of the table.
func of(column int, audit, clone uint32) architecture {
	a := architecture{audit: audit, clone: clone}
	for _, r := range table {
		if n := r.number[column]; n != none {
			a.calls = append(a.calls, call{n, r.answer, r.spaces})
		}
	}
	return a
}
