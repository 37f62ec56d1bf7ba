package main

func doctorCommand(args []string) int {
	var flags doctorFlags
	if _, err := parse(&flags, args); err != nil {
		return fail(err)
	}
	if flags.Help {
		return help("doctor")
	}
	return 0
}
