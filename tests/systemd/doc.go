// Package systemd has tests of the built command for a login session under systemd, where
// nobody but systemd can make a cgroup. They are built with the tag systemd, and run by
// ./setup.sh test-vm.
package systemd
