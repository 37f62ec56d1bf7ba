// Package setup holds the scripts behind the two commands of the README: what
// brings a fresh machine to a first run, and what passes the tests.
//
//	install.sh   installs what is missing, by the distribution's own package manager
//	demo.sh      runs the main job on the fixtures
//	test.sh      runs all tests, as root and as an ordinary user
//	as.sh        go test's -exec for the second of them
//
// They are for a POSIX shell, because bash is among what is installed.
package setup
