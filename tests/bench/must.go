package main

import "fmt"

// failure is the value of must's panics. Deferred functions then end the processes of the benchmark.
type failure struct{ error }

// must ends the benchmark on an error.
func must(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// got returns a value, or ends the benchmark on an error.
func got[T any](v T, err error) T {
	must(err)
	return v
}

// fail ends the benchmark.
func fail(format string, args ...any) { must(fmt.Errorf(format, args...)) }

// caught runs a part of the benchmark, such as a goroutine, and returns the error that ended it.
func caught(part func()) (err error) {
	defer func() {
		switch reason := recover().(type) {
		case nil:
		case failure:
			err = reason.error
		default:
			panic(reason)
		}
	}()
	part()
	return nil
}
