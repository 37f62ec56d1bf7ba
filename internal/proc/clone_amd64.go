package proc

// cloneTLS gives the last two arguments of clone(2), which differ: here the child's
// thread id comes first.
//
//go:nosplit
//go:norace
func cloneTLS(tls uintptr) (d, e uintptr) { return 0, tls }
