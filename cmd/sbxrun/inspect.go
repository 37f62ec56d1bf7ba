package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"os"

	"github.com/sbxrun/sbxrun/cleanup/result"
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
	text, err := result.JSON(all)
	var b bytes.Buffer
	if err == nil {
		err = json.Indent(&b, text, "", "  ")
	}
	if err == nil {
		_, err = b.WriteTo(os.Stdout)
	}
	return cmp.Or(printed(err), code)
}
