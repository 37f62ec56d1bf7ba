package main

import (
	"cmp"
	"encoding/json"
	"os"

	"github.com/sbxrun/sbxrun/internal/cli"
)

func inspectCommand(flags *cli.Inspect) int {
	code := 0
	all := []described{}
	for _, name := range flags.Sandboxes {
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
