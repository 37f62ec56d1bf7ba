package cli

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/values"
)

// ErrHelp is what [Parse] returns for --help.
var ErrHelp = errors.New("help requested")

// Parse fills flags, a pointer to the struct of a command in [CLI], from the words after the command's name. The command
// line of run, start and exec begins at the first positional word, or after --, and is taken verbatim. Other commands
// accept flags and names in any order. Parse exports --state-dir and --data-dir as environment variables, so that
// processes started in the background inherit them. The error is a usage error, or [ErrHelp]; --json is set even then.
func Parse(flags any, args []string) error {
	// kong takes 5 µs for each flag, which is 0.5 ms for all of run. Only error messages need all of them.
	err := parse(flags, args, given(args))
	if err != nil && !errors.Is(err, ErrHelp) {
		err = parse(flags, args, func(reflect.StructField) bool { return true })
	}
	if err == nil {
		return export(flags)
	}
	payload := field(flags, "Command").IsValid()
	if f := field(flags, "JSON"); f.IsValid() && asks(args, payload, "--json") {
		f.SetBool(true)
	}
	if errors.Is(err, ErrHelp) || asks(args, payload, "--help", "-h") {
		return ErrHelp
	}
	return UsageError(flags, explain(Name(flags), args, err))
}

// given returns a function that reports whether args may contain the flag of a field.
func given(args []string) func(f reflect.StructField) bool {
	var names, letters string
	for _, arg := range args {
		if arg == "--" {
			break
		} else if name, long := strings.CutPrefix(arg, "--"); long {
			names += strings.ReplaceAll(name, "-", "") + " "
		} else if isFlag(arg) {
			letters += arg
		}
	}
	return func(f reflect.StructField) bool {
		alias, short := strings.ReplaceAll(f.Tag.Get("aliases"), "-", ""), f.Tag.Get("short")
		return strings.Contains(names, strings.ToLower(f.Name)) || alias != "" && strings.Contains(names, alias) || short != "" && strings.Contains(letters, short)
	}
}

// names is some of the names among the arguments. For kong, a type with a name is not cumulative.
type names []string

// choose returns the positional arguments, commands and wanted flags of a struct, with their values. It sets other flags
// to their defaults. Names, which may come before and after flags, become n arguments, because kong expects all words of
// an argument together.
func choose(command reflect.Value, n int, wanted func(f reflect.StructField) bool) (fields []reflect.StructField, values []reflect.Value) {
	for f, v := range command.Fields() {
		switch {
		case f.Anonymous:
			embedded, of := choose(v, n, wanted)
			fields, values = append(fields, embedded...), append(values, of...)
		case strings.HasPrefix(string(f.Tag), "arg:") && f.Type.Kind() == reflect.Slice && f.Tag.Get("passthrough") == "":
			for i := range n {
				fields = append(fields, reflect.StructField{Name: fmt.Sprint(f.Name, i), Type: reflect.TypeFor[names](), Tag: f.Tag})
				values = append(values, v)
				f.Tag = `arg:"" optional:""`
			}
		case strings.HasPrefix(string(f.Tag), "arg:"), strings.HasPrefix(string(f.Tag), "cmd:"), wanted(f):
			fields, values = append(fields, reflect.StructField{Name: f.Name, Type: f.Type, Tag: f.Tag}), append(values, v)
		case f.Tag.Get("default") != "":
			_ = decode(v, f.Tag.Get("default")) // TestParseGiven parses it
		}
	}
	return fields, values
}

// parse fills flags with a grammar of the wanted flags.
func parse(flags any, args []string, wanted func(f reflect.StructField) bool) error {
	n := 1
	for _, arg := range args {
		if arg == "--" {
			break
		} else if isFlag(arg) {
			n++
		}
	}
	fields, targets := choose(reflect.ValueOf(flags).Elem(), n+1, wanted)
	options := []kong.Option{kong.Name("sbxrun"), kong.Exit(func(int) {}), kong.Help(func(kong.HelpOptions, *kong.Context) error { return ErrHelp })}
	for _, f := range fields {
		if !strings.HasPrefix(string(f.Tag), "cmd:") && f.Type.Kind() != reflect.Bool {
			options = append(options, kong.TypeMapper(f.Type, kong.MapperFunc(word)))
		}
	}
	grammar := reflect.New(reflect.StructOf(fields))
	k, err := kong.New(grammar.Interface(), options...)
	if err != nil {
		panic(fmt.Sprintf("cli: %T: %v", flags, err)) // TestParseGiven builds all of them
	}
	ctx, err := k.Parse(args)
	if err != nil {
		return err
	}
	for i, target := range targets {
		if v := grammar.Elem().Field(i); v.Type() == target.Type() {
			target.Set(v)
		} else {
			target.Set(reflect.AppendSlice(target, v.Convert(target.Type())))
		}
	}
	return useless(ctx)
}

// useless returns an error for a flag that has no effect without another one.
func useless(ctx *kong.Context) error {
	for _, path := range ctx.Path {
		if path.Flag == nil || !path.Flag.Tag.Has("needs") {
			continue
		}
		missing, met := []string{}, false
		for need := range strings.FieldsSeq(path.Flag.Tag.Get("needs")) {
			name, value, _ := strings.Cut(need, "=")
			if f := flagOf(ctx.Model.Node, "--"+name); f != nil {
				met = met || value != "" && f.Target.String() == value || value == "" && !f.Target.IsZero()
				missing = append(missing, "--"+strings.Replace(need, "=", " ", 1))
			}
		}
		if !met {
			return fmt.Errorf("--%s: has no effect without %s", path.Flag.Name, or(missing))
		}
	}
	return nil
}

// word decodes the value of a flag, a positional argument, names, or the words of a command line. Unlike kong's own mappers it
// accepts negative numbers, does not split lists at commas, keeps bytes that are not UTF-8, and refuses empty values.
func word(ctx *kong.DecodeContext, target reflect.Value) error {
	token, choices := ctx.Scan.Pop(), Choices(ctx.Value.Tag)
	text := token.String()
	switch {
	case ctx.Value.Flag == nil && target.Kind() == reflect.Slice:
		if text != "--" || !ctx.Value.Passthrough {
			target.Set(reflect.Append(target, reflect.ValueOf(text)))
		}
		for next := ctx.Scan.Peek(); !next.IsEOL() && (ctx.Value.Passthrough || next.IsValue()); next = ctx.Scan.Peek() {
			target.Set(reflect.Append(target, reflect.ValueOf(ctx.Scan.Pop().String())))
		}
		return nil
	case ctx.Value.Flag == nil:
	case token.IsEOL():
		return errors.New("needs a value")
	case token.InferredType().IsAny(kong.FlagToken, kong.ShortFlagToken) && strings.Trim(text[1:2], "0123456789.") != "":
		return fmt.Errorf("needs a value, and %q looks like a flag; if it is the value, write --%s=%[1]s", text, ctx.Value.Name)
	case text == "" && target.Kind() == reflect.String: // usually an unset shell variable
		return errors.New("the value is empty")
	case choices != nil && !slices.ContainsFunc(choices, func(c string) bool { return text == c || strings.HasSuffix(c, "=") && strings.HasPrefix(text, c) }):
		return fmt.Errorf("invalid value %q: want %s", text, strings.ReplaceAll(or(choices), "=", "=HOST[:PORT],..."))
	}
	return decode(target, text)
}

// decode sets a value from its text, or appends to it.
func decode(target reflect.Value, text string) error {
	switch v := target.Addr().Interface().(type) {
	case encoding.TextUnmarshaler:
		return v.UnmarshalText([]byte(text))
	case *[]string:
		*v = append(*v, text)
	case *string:
		*v = text
	}
	return nil
}

// Choices returns the values of a flag, or nil if it takes any. Anything may follow one that ends with =.
func Choices(tag *kong.Tag) []string {
	if !tag.Has("choices") {
		return nil
	}
	return strings.Split(tag.Get("choices"), "|")
}

// asks reports whether one of the words is among the flags in args, which could not be parsed. The word after an
// unknown flag may be its value, so a command line, which follows the flags with payload, does not begin there.
func asks(args []string, payload bool, words ...string) bool {
	for i, arg := range args {
		switch {
		case slices.Contains(words, arg):
			return true
		case arg == "--" || payload && !isFlag(arg) && (i == 0 || !isFlag(args[i-1]) || strings.Contains(args[i-1], "=")):
			return false
		}
	}
	return false
}

func isFlag(word string) bool { return strings.HasPrefix(word, "-") && word != "-" }

// Command returns a function that parses the words after a command's name, runs the command, prints its result, and
// returns the exit code.
func Command[F any](run func(*F) (output.Result, error)) func(args []string) int {
	return func(args []string) int {
		flags := new(F)
		var r output.Result
		err := Parse(flags, args)
		if err == nil {
			r, err = run(flags)
		}
		return Finish(flags, r, err)
	}
}

// Finish prints the outcome of a command with these flags, or the help that they ask for, and returns the exit code.
func Finish(flags any, r output.Result, err error) int {
	if errors.Is(err, ErrHelp) {
		r, err = Help(Name(flags)), nil
	}
	f := field(flags, "JSON")
	return output.Finish(f.IsValid() && f.Bool(), r, err)
}

// UsageError returns err as a usage error with a hint to the help of the command. An error with a hint or another code
// stays the same.
func UsageError(flags any, err error) error {
	if e, ok := errors.AsType[*result.Error](err); ok && (e.Code != "usage" || e.Hint != "") {
		return err
	}
	return &result.Error{Code: "usage", Message: err.Error(), Hint: "see sbxrun " + strings.TrimPrefix(Name(flags)+" --help", "run "), Err: err}
}

// export sets the variables of --state-dir and --data-dir.
func export(flags any) error {
	for name, variable := range map[string]string{"StateDir": "SBXRUN_STATE_DIR", "DataDir": "SBXRUN_DATA_DIR"} {
		if f := field(flags, name); f.IsValid() && f.String() != "" {
			dir, err := filepath.Abs(f.String())
			if err = cmp.Or(err, os.Setenv(variable, dir)); err != nil {
				return err
			}
		}
	}
	return nil
}

func field(flags any, name string) reflect.Value {
	return reflect.ValueOf(flags).Elem().FieldByName(name)
}

// explain rewords kong's error about the words after the name of a command. For an unknown flag it adds a replacement, the other
// commands with the flag, or kong's question about a similar one.
func explain(command string, args []string, err error) error {
	k := Model()
	n := find(k, command)
	if len(n.Children) > 0 {
		var names []string
		for _, c := range n.Children {
			names = append(names, c.Name)
		}
		if len(args) == 0 {
			return fmt.Errorf("no %s command given: want %s", n.Name, or(names))
		}
		return fmt.Errorf("no %s command %q: want %s%s", n.Name, args[0], or(names), instead(n.Name, args[0], "; "))
	}
	message := strings.ReplaceAll(err.Error(), `"`, "")
	if missing, ok := strings.CutPrefix(message, "expected "); ok {
		return fmt.Errorf("no %s given", strings.Trim(missing, "<> ."))
	}
	wrong, ok := errors.AsType[*kong.ParseError](err)
	flag, similar, _ := strings.Cut(strings.TrimPrefix(message, "unknown flag "), ", did you mean ")
	if !ok || !strings.HasPrefix(message, "unknown flag ") {
		return err
	}
	if len(flag) == len("-x") { // kong names one letter, or a byte of it, and finds all other letters similar
		path := wrong.Context.Path
		word := args[len(args)-len(path[len(path)-1].Remainder())]
		if similar = ""; len(word) > len("-it") || word[1] == flag[1] {
			flag = word
		}
	}
	hint := instead(command, flag, ": ")
	var others []string
	for _, c := range k.Model.Leaves(false) {
		if flagOf(c, flag) != nil {
			others = append(others, strings.Fields(c.Path())[0])
		}
	}
	switch {
	case hint != "":
	case flagOf(n, "-"+flag) != nil:
		hint = ", did you mean -" + flag + "?"
	case others != nil:
		hint = ", which is a flag of " + strings.Join(slices.Compact(others), ", ")
	case similar != "":
		hint = ", did you mean " + similar
	}
	return fmt.Errorf("unknown flag %s%s", flag, hint)
}

// instead returns a hint for a word of another program, such as timeout(1), docker or kill(1), after a separator, or "".
func instead(command, word, separator string) string {
	lines := texts()
	hint := cmp.Or(lines[command+" ?"+word], lines["* ?"+word]).help
	var s values.Signal
	if command == "kill" && s.UnmarshalText([]byte(word[1:])) == nil {
		name := strings.TrimPrefix(unix.SignalName(syscall.Signal(s)), "SIG")
		hint = "use -s " + cmp.Or(name, word[1:]) + " to send a signal, or --grace 0 to kill at once" // real-time signals have no name
	}
	if hint != "" {
		hint = separator + hint
	}
	return hint
}

// or lists words: a, b or c.
func or(words []string) string {
	list := strings.Join(words, ", ")
	if i := strings.LastIndex(list, ", "); i >= 0 {
		list = list[:i] + " or" + list[i+1:]
	}
	return list
}
