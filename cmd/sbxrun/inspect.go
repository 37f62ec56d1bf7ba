package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"os"

	"github.com/sbxrun/sbxrun/cleanup/result"
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
