package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"os"

	"github.com/sbxrun/sbxrun/internal/cli"
)

func inspectCommand(flags *cli.Inspect, names []string) int {
	if len(names) == 0 {
		return failUsage(flags, errors.New("inspect what? name a sandbox"))
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
