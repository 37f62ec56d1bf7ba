module github.com/sbxrun/sbxrun/tests/bench

go 1.26.0

require (
	github.com/sbxrun/sbxrun v0.0.0
	golang.org/x/sys v0.49.0
)

require (
	github.com/hashicorp/errwrap v1.0.0 // indirect
	github.com/hashicorp/go-multierror v1.1.1 // indirect
)

replace github.com/sbxrun/sbxrun => ../..
