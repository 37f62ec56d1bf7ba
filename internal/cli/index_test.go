package cli

import (
	"reflect"
	"regexp"
	"slices"
	"testing"
)

// TestIndex: the tags say all that is needed of a flag, and nothing that the index does not
// read; and no two flags of a command are typed the same.
func TestIndex(t *testing.T) {
	unknown := func(tag reflect.StructTag, known ...string) bool {
		return slices.ContainsFunc(regexp.MustCompile(`(?:^| )(\w+):"`).FindAllStringSubmatch(string(tag), -1), func(m []string) bool { return !slices.Contains(known, m[1]) })
	}
	for _, c := range Commands() {
		if unknown(c.tag, "words", "help", "example", "ended") {
			t.Errorf("%s: tags %s", c.Name, c.tag)
		}
		if c.Help() == "" || c.Words() == "" || c.Example() == "" {
			t.Errorf("%s: help %q, words %q, example %q", c.Name, c.Help(), c.Words(), c.Example())
		}
		var typed []string
		for _, f := range c.Flags {
			typed = append(typed, f.Spellings()...)
			if unknown(f.tag, "help", "placeholder", "default", "short", "alias", "group", "xor", "instead") {
				t.Errorf("%s --%s: tags %s", c.Name, f.Name, f.tag)
			}
			if f.Help() == "" || f.TakesValue() != (f.Placeholder() != "") {
				t.Errorf("%s --%s: help %q, placeholder %q", c.Name, f.Name, f.Help(), f.Placeholder())
			}
			if f.Short() != "" && len(f.Short()) != 1 {
				t.Errorf("%s -%s: want a letter", c.Name, f.Short())
			}
			if !slices.ContainsFunc(topics, func(topic struct{ key, title string }) bool { return topic.key == f.Topic() }) {
				t.Errorf("%s --%s: no topic %q", c.Name, f.Name, f.Topic())
			}
		}
		for i, word := range typed {
			if slices.Contains(typed[:i], word) {
				t.Errorf("%s has %s twice", c.Name, word)
			}
		}
		if !slices.Contains(typed, "--help") {
			t.Errorf("%s has no --help", c.Name)
		}
	}
	if got := Default().Name; got != "run" {
		t.Errorf("the default command is %s", got)
	}
}

func TestSpell(t *testing.T) {
	for field, want := range map[string]string{"RoBindTry": "ro-bind-try", "CPUTime": "cpu-time", "JSON": "json", "ReadyTCP": "ready-tcp", "Env": "env", "OomScoreAdj": "oom-score-adj"} {
		if got := spell(field); got != want {
			t.Errorf("%s: %s, want %s", field, got, want)
		}
	}
}

func TestDistance(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"net", "net", 0}, {"", "net", 3}, {"net", "", 3},
		{"net", "nest", 1}, {"nest", "net", 1}, {"bind", "bond", 1}, {"timeout", "timeotu", 2}, {"kitten", "sitting", 3},
	} {
		if got := distance(tt.a, tt.b); got != tt.want {
			t.Errorf("%q, %q: %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
}

// Each command is parsed with the struct that the index has of it.
func TestCommandOf(t *testing.T) {
	for i, c := range Commands() {
		flags := reflect.New(reflect.TypeFor[CLI]().Field(i).Type).Interface()
		if got := commandOf(flags); got.Name != c.Name || len(got.Flags) != len(c.Flags) {
			t.Errorf("%T: %s with %d flags, want %s with %d", flags, got.Name, len(got.Flags), c.Name, len(c.Flags))
		}
	}
}

// What is looked up without the index is what the index has.
func TestField(t *testing.T) {
	v := reflect.ValueOf(new(CLI)).Elem()
	for i := range v.NumField() {
		flags := v.Field(i).Addr().Interface()
		for name, fieldName := range map[string]string{"help": "Help", "json": "JSON", "state-dir": "StateDir", "data-dir": "DataDir"} {
			f := commandOf(flags).find(func(f *Flag) bool { return f.Name == name })
			if got := field(flags, fieldName); got.IsValid() != (f != nil) || f != nil && got.Addr().Pointer() != f.value.Addr().Pointer() {
				t.Errorf("%T: --%s is not its field %s", flags, name, fieldName)
			}
		}
	}
}
