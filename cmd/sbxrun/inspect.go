package main

import (
	"bytes"
	"encoding/json"
	"io"

	"github.com/hashicorp/go-multierror"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
)

// inspectCommand describes the sandboxes that it finds, and returns errors for the others.
func inspectCommand(flags *cli.Inspect) (r output.Result, err error) {
	var failed *multierror.Error
	all := []described{}
	for _, name := range flags.Sandboxes {
		if e, err := find(name); err != nil {
			failed = multierror.Append(failed, err)
		} else {
			all = append(all, describe(e))
		}
	}
	if len(all) == 0 {
		return r, failed.ErrorOrNil()
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
	}}, failed.ErrorOrNil()
}
