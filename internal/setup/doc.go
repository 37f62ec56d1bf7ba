// Package setup holds the scripts behind the two commands of the README: what
// brings a fresh machine to a first run, and what passes the tests.
//
//	install.sh   installs what is missing, by the distribution's own package manager
//	ready.sh     checks what go needs of the caller
//	build.sh     builds bin/sbxrun
//	demo.sh      runs the main job on the fixtures
//	test.sh      runs the tests, as the user who calls it
//	check.sh     lint, documents, and the tests that take long, as root and as an ordinary user
//	suite.sh     go test for both of these, with what has failed at the end
//	as.sh        go test's -exec for the other user
//	lint.sh      go vet and staticcheck
//	fuzz.sh      every fuzz target for a time
//	dist/make.sh makes archives and packages
//	dist/test.sh makes them twice, and installs them
//	dist/arm64.sh tries the package for arm64
//	vm/run.sh    boots a Debian kernel, with cgroup v2 alone, and runs a command in it
//	vm/test.sh   runs the tests there
//
// They are for a POSIX shell, because bash is among what is installed; those in vm
// come later, and are for bash.
package setup
