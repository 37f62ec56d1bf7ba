package proc

// cloneTLS returns the last two arguments of clone(2), whose order depends on the
// architecture: here the thread-local storage comes first.
//
//go:nosplit
//go:norace
func cloneTLS(tls uintptr) (d, e uintptr) { return tls, 0 }
