// Package systemd tests the built command in a login session under systemd, where only systemd can
// create cgroups. The tests have the build tag systemd; ./setup.sh test-vm runs them.
package systemd
