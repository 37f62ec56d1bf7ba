package main

import (
	"encoding/json"
	"errors"
	"os"

	"github.com/sbxrun/sbxrun/internal/cli"
)

func inspectCommand(args []string) int {
	var flags cli.Inspect
	names, err := cli.ParseNames(&flags, args)
	if err == nil && len(names) == 0 && !flags.Help {
		err = errors.New("inspect what? name a sandbox")
	}
	switch {
	case err != nil:
		return fail(usageError(err))
	case flags.Help:
		return help("inspect")
	}
	code := 0
	all := []described{}
	for _, name := range names {
		e, err := find(name)
		if err != nil {
			code = fail(err)
			continue
		}
		all = append(all, describe(e))
	}
	enc := json.NewEncoder(os.Stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false) // for people, too
	if err := enc.Encode(all); err != nil {
		return fail(printError(err))
	}
	return code
}
