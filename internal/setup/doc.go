// Package setup contains the scripts behind setup.sh.
//
//	install.sh     installs what is missing, with the distribution's package manager
//	ready.sh       checks that go works
//	build.sh       builds bin/sbxrun and bin/sbxrund
//	demo.sh        runs the fixtures under sbxrun
//	test.sh        runs the tests as the current user
//	check.sh       runs lint, the race detector, slow tests, and the tests as the other user
//	nightly.sh     runs what takes too long for every commit
//	later.sh       lists the tests that test.sh and check.sh leave out or repeat less
//	suite.sh       runs go test, and prints the failures at the end
//	as.sh          runs a test binary as the other user
//	lint.sh        runs gofmt, go vet and staticcheck
//	fuzz.sh        runs every fuzz target
//	images.sh      compares images with those of umoci, podman, buildah and skopeo
//	mcp.sh         runs official MCP clients from npm, agents.sh coding agents with a stub model
//	podman.sh      tries the flags for files in a container
//	dist/make.sh   makes archives and packages
//	dist/test.sh   makes them twice, and installs them
//	dist/arm64.sh  tries the package for arm64
//	vm/run.sh      boots a Debian kernel, with cgroup v2 alone, and runs a command in it
//	vm/test.sh     runs the tests there
//
// Those that run before install.sh are POSIX shell scripts, because it may have to install bash.
package setup
