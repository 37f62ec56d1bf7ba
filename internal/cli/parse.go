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
// processes started in the background inherit them. The error is a usage error, or [ErrHelp]; --json is set even then
// (see [WantsJSON]).
func Parse(flags any, args []string) error {
	// kong takes 5 µs for each flag, which is 0.5 ms for all of run. Only error messages need all of them.
	err := parse(flags, args, given(args))
	if err != nil && !errors.Is(err, ErrHelp) {
		err = parse(flags, args, all)
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

func all(reflect.StructField) bool { return true }

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

// choose returns the fields of a struct that are positional arguments, commands or wanted flags, with their values. It
// sets other flags to their defaults.
func choose(command reflect.Value, wanted func(f reflect.StructField) bool) (fields []reflect.StructField, values []reflect.Value) {
	for f, v := range command.Fields() {
		switch {
		case f.Anonymous:
			embedded, of := choose(v, wanted)
			fields, values = append(fields, embedded...), append(values, of...)
		case strings.HasPrefix(string(f.Tag), "arg:"), strings.HasPrefix(string(f.Tag), "cmd:"), wanted(f):
			fields = append(fields, reflect.StructField{Name: f.Name, Type: f.Type, Tag: f.Tag})
			values = append(values, v)
		case f.Tag.Get("default") != "":
			_ = decode(v, f.Tag.Get("default")) // TestParseGiven parses it
		}
	}
	return fields, values
}

// parse fills flags with a grammar of the wanted flags.
func parse(flags any, args []string, wanted func(f reflect.StructField) bool) error {
	fields, targets := choose(reflect.ValueOf(flags).Elem(), wanted)
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
	var line *[]string // the words of the last argument
	if n := len(k.Model.Positional); n > 0 {
		line, _ = k.Model.Positional[n-1].Target.Addr().Interface().(*[]string)
	}
	// kong expects all names on one side of the flags: in kill A --grace 0 B it does not expect B.
	var late []string
	for line != nil && err != nil && strings.HasPrefix(err.Error(), "unexpected argument") {
		wrong, _ := errors.AsType[*kong.ParseError](err)
		path := wrong.Context.Path
		i := len(args) - len(path[len(path)-1].Remainder())
		if args[i] == "--" {
			i++
		}
		late, args = append(late, args[i]), slices.Concat(args[:i], args[i+1:])
		ctx, err = k.Parse(args)
	}
	if err != nil {
		return err
	}
	if line != nil {
		*line = append(*line, late...)
		if field(flags, "Command").IsValid() && len(*line) > 0 && (*line)[0] == "--" {
			*line = (*line)[1:]
		}
	}
	for i, target := range targets {
		target.Set(grammar.Elem().Field(i))
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

// word decodes one value of a flag or a positional argument, and all consecutive words of a repeated argument. Unlike
// kong's own mappers it accepts negative numbers, does not split lists at commas, keeps bytes that are not UTF-8, and
// refuses empty values.
func word(ctx *kong.DecodeContext, target reflect.Value) error {
	token := ctx.Scan.Pop()
	text := token.String()
	if ctx.Value.Flag != nil {
		choices := Choices(ctx.Value.Tag)
		switch {
		case token.IsEOL():
			return errors.New("needs a value")
		case token.InferredType().IsAny(kong.FlagToken, kong.ShortFlagToken) && strings.Trim(text[1:2], "0123456789.") != "":
			return fmt.Errorf("needs a value, and %q looks like a flag; if it is the value, write --%s=%[1]s", text, ctx.Value.Name)
		case text == "" && target.Kind() == reflect.String: // usually an unset shell variable
			return errors.New("the value is empty")
		case choices != nil && !slices.ContainsFunc(choices, func(c string) bool {
			return text == c || strings.HasSuffix(c, "=") && strings.HasPrefix(text, c)
		}):
			return fmt.Errorf("invalid value %q: want %s", text, strings.ReplaceAll(or(choices), "=", "=HOST[:PORT],..."))
		}
	}
	if err := decode(target, text); err != nil {
		return err
	}
	if line, ok := target.Addr().Interface().(*[]string); ok && ctx.Value.Flag == nil {
		for !ctx.Scan.Peek().IsEOL() && (ctx.Value.Passthrough || ctx.Scan.Peek().IsValue()) {
			*line = append(*line, ctx.Scan.Pop().String())
		}
	}
	return nil
}

// decode sets a value from its text.
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

// Flags returns an empty struct of the command, or the group of commands, that args begin with, and the rest of args.
func Flags(args []string) (flags any, rest []string) {
	v := reflect.ValueOf(new(CLI)).Elem()
	for len(args) > 0 {
		f, ok := v.Type().FieldByNameFunc(func(name string) bool { return strings.ToLower(name) == args[0] })
		if !ok || !strings.HasPrefix(string(f.Tag), "cmd:") {
			break
		}
		v, args = v.FieldByIndex(f.Index), args[1:]
	}
	return v.Addr().Interface(), args
}

// Finish prints the outcome of a command with these flags, or the help that they ask for, and returns the exit code.
func Finish(flags any, r output.Result, err error) int {
	if errors.Is(err, ErrHelp) {
		return output.Finish(false, Help(strings.Fields(Name(flags))...), nil)
	}
	return output.Finish(WantsJSON(flags), r, err)
}

// UsageError returns err as a usage error with a hint to the help of the command. An error with a hint or another code
// stays the same.
func UsageError(flags any, err error) error {
	if e, ok := errors.AsType[*result.Error](err); ok && (e.Code != "usage" || e.Hint != "") {
		return err
	}
	return &result.Error{Code: "usage", Message: err.Error(), Hint: "see sbxrun " + strings.TrimPrefix(Name(flags)+" --help", "run "), Err: err}
}

// Name returns the name of the command that flags is a pointer to the struct of, such as "run" or "snapshot ls".
func Name(flags any) string {
	name := strings.ToLower(reflect.TypeOf(flags).Elem().Name())
	for _, group := range []string{"snapshot", "image", "volume"} {
		if command, ok := strings.CutPrefix(name, group); ok && command != "" {
			return group + " " + command
		}
	}
	return name
}

// WantsJSON reports whether flags, a pointer to the struct of a command, have --json set, even after an error of [Parse].
func WantsJSON(flags any) bool {
	f := field(flags, "JSON")
	return f.IsValid() && f.Bool()
}

// export sets the variables of --state-dir and --data-dir.
func export(flags any) error {
	for name, variable := range map[string]string{"StateDir": "SBXRUN_STATE_DIR", "DataDir": "SBXRUN_DATA_DIR"} {
		if f := field(flags, name); f.IsValid() && f.String() != "" {
			dir, err := filepath.Abs(f.String())
			if err == nil {
				err = os.Setenv(variable, dir)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func field(flags any, name string) reflect.Value {
	return reflect.ValueOf(flags).Elem().FieldByName(name)
}

// explain rewords kong's error. For an unknown flag it adds a replacement, the other commands with the flag, or kong's
// question about a similar one.
func explain(command string, args []string, err error) error {
	if n := find(Model().Model.Node, strings.Fields(command)); len(n.Children) > 0 {
		var names []string
		for _, c := range n.Children {
			names = append(names, c.Name)
		}
		if len(args) == 0 {
			return fmt.Errorf("no %s command given: want %s", command, or(names))
		}
		return fmt.Errorf("no %s command %q: want %s%s", command, args[0], or(names), instead(command, args[0], "; "))
	}
	message := strings.ReplaceAll(err.Error(), `"`, "")
	if missing, ok := strings.CutPrefix(message, "expected "); ok {
		return fmt.Errorf("no %s given", strings.Trim(missing, "<> ."))
	}
	unknown, ok := strings.CutPrefix(message, "unknown flag ")
	if !ok {
		return err
	}
	flag, _, similar := strings.Cut(unknown, ", did you mean ")
	if len(flag) == len("-x") {
		// kong names one letter, or a byte of it, and finds all other letters similar.
		similar = false
		for _, arg := range args {
			if isFlag(arg) && arg[1] != '-' && strings.Contains(arg, flag[1:]) && (len(arg) > len("-it") || arg[1] == flag[1]) {
				flag = arg
				break
			}
		}
	}
	if hint := instead(command, flag, ": "); hint != "" {
		return fmt.Errorf("unknown flag %s%s", flag, hint)
	}
	var others []string
	for _, c := range Commands() {
		if c.Path() == command && flagOf(c, "-"+flag) != nil {
			return fmt.Errorf("unknown flag %s, did you mean -%[1]s?", flag)
		}
		if flagOf(c, flag) != nil {
			others = append(others, strings.Fields(c.Path())[0])
		}
	}
	switch {
	case others != nil:
		return fmt.Errorf("unknown flag %s, which is a flag of %s", flag, strings.Join(slices.Compact(others), ", "))
	case similar:
		return errors.New(message)
	}
	return fmt.Errorf("unknown flag %s", flag)
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
	last := len(words) - 1
	if last <= 0 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}
