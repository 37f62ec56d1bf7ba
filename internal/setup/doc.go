// Package setup holds the scripts behind the two commands of the README: what
// brings a fresh machine to a first run, and what passes the tests.
//
//	install.sh   installs what is missing, by the distribution's own package manager
//	demo.sh      runs the main job on the fixtures
//	test.sh      runs all tests, as root and as an ordinary user
//	as.sh        go test's -exec for the second of them
//	vm/run.sh    boots a Debian kernel, with cgroup v2 alone, and runs a command in it
//	vm/test.sh   runs the tests there
//
// They are for a POSIX shell, because bash is among what is installed; those in vm
// come later, and are for bash.
package setup
