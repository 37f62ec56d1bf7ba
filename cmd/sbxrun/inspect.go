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
	for i, name := range flags.Sandboxes {
		e, err := find(name)
		switch {
		case err == nil:
			all = append(all, describe(e))
		case len(all) == 0 && i == len(flags.Sandboxes)-1:
			return refuse(flags, err)
		default:
			code = fail(err)
		}
	}
	enc := json.NewEncoder(os.Stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false) // as result.JSON
	return cmp.Or(printed(enc.Encode(all)), code)
}
