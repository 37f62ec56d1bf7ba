package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"os"

	"github.com/sbxrun/sbxrun/internal/cli"
)

func inspectCommand(args []string) int {
	var flags cli.Inspect
	names, err := parse(&flags, args)
	if err == nil && len(names) == 0 {
		err = errors.New("inspect what? name a sandbox")
	}
	if err != nil {
		return failUsage(&flags, err)
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
	enc.SetEscapeHTML(false) // as result.JSON
	return cmp.Or(printed(enc.Encode(all)), code)
}
