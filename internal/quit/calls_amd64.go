package quit

// The numbers of rt_sigaction(2) and exit_group(2).
const (
	sysSigaction = 13
	sysExitGroup = 231
)
