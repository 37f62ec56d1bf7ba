package limits

import (
	"bytes"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// row is the number that stands after key, as in memory.events; of a file of one
// number the key is "".
func row(data []byte, key string) (n int64, ok bool) {
	for line := range bytes.Lines(data) {
		f := strings.Fields(string(line))
		if key == "" {
			f = append([]string{""}, f...)
		}
		if len(f) != 2 || f[0] != key {
			continue
		}
		n, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil || n < 0 {
			return 0, false
		}
		return n, true
	}
	return 0, false
}

func write(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for {
		if _, err = unix.Write(fd, []byte(value)); err != unix.EINTR {
			return err
		}
	}
}
