package main

import (
	"bytes"
	"errors"
	"os/exec"
	"strings"

	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

func init() { devices.YAML = yamlBySibling }

// yamlBySibling lets sbxrund translate a device specification from YAML.
func yamlBySibling(text []byte) ([]byte, error) {
	server, err := safeopen.Sibling()
	if err != nil {
		return nil, err
	}
	var out, said bytes.Buffer
	cmd := exec.Command(server, devices.YAMLWord)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), &out, &said
	err = cmd.Run()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return nil, errors.New(strings.TrimPrefix(strings.TrimSpace(said.String()), "sbxrun: error: "))
	}
	if err != nil {
		return nil, safeopen.SiblingError(server, err)
	}
	return out.Bytes(), nil
}
