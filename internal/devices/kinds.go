package devices

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// refused are drivers whose devices give away more of the host than themselves, by their names in /proc/devices and
// /proc/misc. A GPU, a camera, a serial port or KVM is not refused, because the user has named it.
var refused = []struct {
	reason  string
	drivers []string
}{
	{"it leads to the host's memory, I/O ports or kernel log", []string{"mem", "snapshot", "dax", "uio", "xen/privcmd", "xen/hypercall", "xen/gntdev", "crash", "vboxdrv"}},
	{"it controls the host's processors, firmware or power", []string{"cpu/msr", "nvram", "mei", "ipmidev", "watchdog", "efi_capsule_loader"}},
	{"its bus also leads to the host's firmware, memory modules and power supply", []string{"i2c", "spi"}},
	{"it uses the host's keys", []string{"tpm"}},
	{"it leads to the host's disks", []string{"sg", "bsg", "st", "osst", "ch", "nvme", "nvme-generic", "nvme-fabrics", "raw", "mtd", "ubi_ctrl", "ndctl", "dimmctl", "btrfs-control", "zfs",
		"megaraid_sas_ioctl", "megadev_legacy", "mpt2ctl", "mpt3ctl", "aac", "pmcraid", "twa", "twe", "twl"}},
	{"it reads all traffic of the host's USB devices, such as keyboards and disks", []string{"usbmon"}},
	{"it reads the keyboard or screen of the host, or types on it", []string{"input", "hidraw", "uhid", "uinput", "vcs", "fb"}},
	{"it is a terminal of the host", []string{"tty", "/dev/tty", "/dev/vc/0", "/dev/console", "/dev/ptmx", "ptm", "pts"}},
	{"it creates devices or mounts on the host", []string{"loop-control", "device-mapper", "cuse", "autofs", "vhci"}},
	{"the system call filter refuses userfaultfd(2)", []string{"userfaultfd"}},
}

// harmless are the minor numbers of the devices of driver mem that every sandbox has: null, zero, full, random and
// urandom.
var harmless = []uint32{3, 5, 7, 8, 9}

// Refused returns the reason why no sandbox may have the character device with this number, or "".
func Refused(number uint64) (why string, err error) {
	const mem, misc = 1, 10
	major, minor := unix.Major(number), unix.Minor(number)
	list, wanted := "/proc/devices", major
	switch {
	case major == mem && slices.Contains(harmless, minor):
		return "", nil
	case major == misc:
		list, wanted = "/proc/misc", minor
	}
	text, err := os.ReadFile(list)
	if err != nil {
		return "", err
	}
	names := drivers(string(text), wanted)
	if len(names) == 0 {
		return fmt.Sprintf("the kernel has no driver for it (%d:%d)", major, minor), nil
	}
	const serial = 64 // the first serial port; consoles have the same major number
	if slices.Contains(names, "ttyS") && minor >= serial {
		return "", nil
	}
	return reason(names), nil
}

// reason returns the reason why a device with one of these drivers is refused, or "".
func reason(names []string) string {
	for _, r := range refused {
		if slices.ContainsFunc(names, func(name string) bool { return slices.Contains(r.drivers, name) }) {
			return r.reason
		}
	}
	return ""
}

// drivers returns the names for a number in /proc/misc, or for character devices in /proc/devices.
func drivers(text string, number uint32) (names []string) {
	text, _, _ = strings.Cut(text, "\nBlock devices:")
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 2 {
			continue
		}
		if n, err := strconv.ParseUint(f[0], 10, 32); err == nil && uint32(n) == number {
			names = append(names, f[1])
		}
	}
	return names
}
