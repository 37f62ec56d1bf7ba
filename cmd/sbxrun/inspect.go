package main

import (
	"bytes"
	"encoding/json"
	"io"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
)

// inspectCommand describes the sandboxes that it finds, and returns errors for the others.
func inspectCommand(flags *cli.Inspect) (r output.Result, err error) {
	all := []described{}
	err = output.Each(flags.Sandboxes, func(name string) error {
		e, err := find(name)
		if err == nil {
			all = append(all, describe(e))
		}
		return err
	})
	if len(all) == 0 {
		return r, err
	}
	return output.Result{Value: all, Text: func(w io.Writer) error {
		text, err := result.JSON(all)
		if err != nil {
			return err
		}
		var b bytes.Buffer
		if err = json.Indent(&b, text, "", "  "); err == nil {
			_, err = b.WriteTo(w)
		}
		return err
	}}, err
}
