package proc

// cloneTLS gives the last two arguments of clone(2), which differ: here the
// thread-local storage comes first.
//
//go:nosplit
//go:norace
func cloneTLS(tls uintptr) (d, e uintptr) { return tls, 0 }
