package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The configuration reference lists every key with its default.
func TestDefaultsAreDocumented(t *testing.T) {
	document := harness.ReadFile(t, "../../docs/reference/configuration.md")
	_, block, _ := strings.Cut(string(document), "```toml\n")
	block, _, _ = strings.Cut(block, "```\n")
	defaults, _, found := strings.Cut(block, "# Examples:\n")
	check.Require(t, found, "configuration.md has no block of defaults followed by examples")
	file := filepath.Join(t.TempDir(), "serve.toml")
	check.Must(t, os.WriteFile(file, []byte(defaults), 0o600))
	documented, err := Load(file)
	check.Must(t, err)
	want := Default()
	documented.StateDir, documented.DataDir = want.StateDir, want.DataDir // depends on the user
	check.NoDiff(t, cmp.Diff(flat(reflect.ValueOf(want)), flat(reflect.ValueOf(documented))), "defaults in the code, against configuration.md (-code +doc)")
	tables := regexp.MustCompile(`(?m)^\[([a-z]+)`)
	have := map[string]bool{}
	table := ""
	for line := range strings.Lines(block) {
		if m := tables.FindStringSubmatch(line); m != nil {
			table = m[1] + "."
		} else if key, _, ok := strings.Cut(line, " ="); ok {
			have[table+key] = true
		}
	}
	for key := range flat(reflect.ValueOf(Config{})) {
		check.That(t, have[key], "configuration.md lacks %s", key)
	}
}

// flat returns the values of a configuration by key, without tables whose keys are names.
func flat(v reflect.Value) map[string]string {
	values := map[string]string{}
	for i := range v.NumField() {
		f, key := v.Field(i), v.Type().Field(i).Tag.Get("toml")
		switch f.Kind() {
		case reflect.Map:
		case reflect.Struct:
			for name, value := range flat(f) {
				values[key+"."+name] = value
			}
		default:
			values[key] = fmt.Sprint(f.Interface())
		}
	}
	return values
}
