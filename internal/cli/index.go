package cli

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Description is what sbxrun is for.
const Description = "Run a command in a sandbox, and leave nothing behind."

type Command struct {
	Name  string
	Flags []Flag
	tag   reflect.StructTag
}

// Flag is a flag of a command, and the field that its value goes to. Its tags are read
// when they are asked for: a run asks for few of them, and starts the sooner.
type Flag struct {
	Name  string
	tag   reflect.StructTag
	value reflect.Value
	given bool
}

func Commands() (all []Command) {
	t := reflect.TypeFor[CLI]()
	for i := range t.NumField() {
		all = append(all, newCommand(t.Field(i), reflect.New(t.Field(i).Type).Elem()))
	}
	return all
}

// Default returns the command that need not be named.
func Default() Command { return Commands()[0] }

// commandOf returns the command that flags is a pointer to the struct of.
func commandOf(flags any) Command {
	t := reflect.TypeFor[CLI]()
	v := reflect.ValueOf(flags).Elem()
	for i := range t.NumField() {
		if t.Field(i).Type == v.Type() {
			return newCommand(t.Field(i), v)
		}
	}
	panic(fmt.Sprintf("cli: %T belongs to no command", flags))
}

// Refusal is what --json prints where a command has come to nothing.
type Refusal struct {
	ExitCode int                 `json:"exit_code"`
	Error    *result.ReportError `json:"error"`
}

// WantsJSON reports whether flags, a pointer to the struct of a command, have --json set:
// also after an error of [Parse].
func WantsJSON(flags any) bool {
	f := field(flags, "JSON")
	return f.IsValid() && f.Bool()
}

// Export sets the variables that --state-dir and --data-dir in flags stand for: what is started in the
// background has them, too.
func Export(flags any) (err error) {
	for _, dir := range []struct{ field, variable string }{{"StateDir", "SBXRUN_STATE_DIR"}, {"DataDir", "SBXRUN_DATA_DIR"}} {
		if f := field(flags, dir.field); f.IsValid() && f.String() != "" {
			err = cmp.Or(err, os.Setenv(dir.variable, f.String()))
		}
	}
	return err
}

// field returns what holds a flag. The index, which [Parse] has made, would take a hundred times as long.
func field(flags any, name string) reflect.Value {
	return reflect.ValueOf(flags).Elem().FieldByName(name)
}

func newCommand(field reflect.StructField, flags reflect.Value) Command {
	return Command{Name: spell(field.Name), Flags: appendFlags(make([]Flag, 0, 64), flags), tag: field.Tag}
}

// appendFlags adds the flags of a struct and of those that it embeds.
func appendFlags(all []Flag, v reflect.Value) []Flag {
	t := v.Type()
	for i := range t.NumField() {
		if f := t.Field(i); f.Anonymous {
			all = appendFlags(all, v.Field(i))
		} else {
			all = append(all, Flag{Name: spell(f.Name), tag: f.Tag, value: v.Field(i)})
		}
	}
	return all
}

// spell returns how the name of a field is typed: RoBindTry is ro-bind-try, CPUTime is
// cpu-time, JSON is json.
func spell(field string) string {
	upper := func(i int) bool { return i < len(field) && field[i] >= 'A' && field[i] <= 'Z' }
	b := make([]byte, 0, 2*len(field))
	for i, c := range []byte(field) {
		if i > 0 && upper(i) && (!upper(i-1) || i+1 < len(field) && !upper(i+1)) {
			b = append(b, '-')
		}
		if upper(i) {
			c += 'a' - 'A'
		}
		b = append(b, c)
	}
	return string(b)
}

// Help is what the command does, in a sentence.
func (c Command) Help() string { return c.tag.Get("help") }

// Words is what follows the command's name: [flags] SANDBOX... and the like.
func (c Command) Words() string { return c.tag.Get("words") }

// Example is a command line with it.
func (c Command) Example() string { return c.tag.Get("example") }

// Payload reports whether the words end with a command line of its own.
func (c Command) Payload() bool { return strings.Contains(c.Words(), "COMMAND") }

// Sandboxes is how many names of sandboxes are among the words: none, one or many; or that
// they are paths, some with the name of a sandbox and a colon before them.
func (c Command) Sandboxes() string {
	switch words := c.Words(); {
	case strings.Contains(words, "SANDBOX:"):
		return "paths"
	case strings.Contains(words, "SANDBOX[/EXEC]..."), strings.Contains(words, "SANDBOX|"):
		return "many"
	case strings.Contains(words, "SANDBOX"):
		return "one"
	}
	return "none"
}

// Execs reports whether a name may be that of a detached exec as well.
func (c Command) Execs() bool { return strings.Contains(c.Words(), "[/EXEC]") }

// Names reports whether the words are names of something else than sandboxes.
func (c Command) Names() bool { return strings.Contains(c.Words(), "NAME") }

// Ended reports whether the names may be of sandboxes that have ended.
func (c Command) Ended() bool { _, ok := c.tag.Lookup("ended"); return ok }

// find returns the flag that matches, or nil.
func (c Command) find(matches func(*Flag) bool) *Flag {
	if i := slices.IndexFunc(c.Flags, func(f Flag) bool { return matches(&f) }); i >= 0 {
		return &c.Flags[i]
	}
	return nil
}

func (f Flag) Help() string        { return f.tag.Get("help") }
func (f Flag) Short() string       { return f.tag.Get("short") }
func (f Flag) Alias() string       { return f.tag.Get("alias") }
func (f Flag) Placeholder() string { return f.tag.Get("placeholder") }
func (f Flag) Default() string     { return f.tag.Get("default") }
func (f Flag) Topic() string       { return f.tag.Get("group") }

// TakesValue reports whether the flag is followed by a value. Others are switches.
func (f Flag) TakesValue() bool { return f.value.Kind() != reflect.Bool }

// Repeats reports whether the flag may be given more than once.
func (f Flag) Repeats() bool { return f.value.Kind() == reflect.Slice }

// Spellings are all ways to type the flag: --grace, --kill-after, -k.
func (f Flag) Spellings() []string {
	words := []string{"--" + f.Name}
	if f.Alias() != "" {
		words = append(words, "--"+f.Alias())
	}
	if f.Short() != "" {
		words = append(words, "-"+f.Short())
	}
	return words
}

// Choices are the values of a flag whose placeholder names them, as none|host does.
func (f Flag) Choices() []string {
	return slices.DeleteFunc(f.words(), func(word string) bool { return strings.Contains(word, "=") })
}

// words are all that a list of choices has.
func (f Flag) words() []string {
	if p := f.Placeholder(); strings.Contains(p, "|") && p == strings.ToLower(p) {
		return strings.Split(p, "|")
	}
	return nil
}

// accepts reports whether a value is one of the choices, or begins as one of them does.
func (f Flag) accepts(value string) bool {
	words := f.words()
	return words == nil || slices.ContainsFunc(words, func(word string) bool {
		beginning, _, open := strings.Cut(word, "=")
		return value == word && !open || open && strings.HasPrefix(value, beginning+"=")
	})
}

// set sets the flag's field.
func (f *Flag) set(text string) (err error) {
	if u, ok := f.value.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return u.UnmarshalText([]byte(text))
	}
	switch f.value.Kind() {
	case reflect.Bool:
		on, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q: want true or false", text)
		}
		f.value.SetBool(on)
	case reflect.Slice:
		f.value.Set(reflect.Append(f.value, reflect.ValueOf(text)))
	default:
		if text == "" { // an unset variable of a script, above all: the flag would do nothing
			return errors.New("the value is empty")
		}
		f.value.SetString(text)
	}
	return nil
}
